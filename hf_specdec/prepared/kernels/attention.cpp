// Attention of few tokens.

namespace {

struct Shape {
  int64_t heads, queries, slots, width;  // of one row and one head of the keys: the heads of queries that share it
  int64_t mask_head, mask_query, out_head, out_query;  // strides
};

enum Sight : uint8_t { kUnseen, kSeenBySome, kSeenByAll };  // of a slot, by the rows of queries

// Turns a row's scores, `padded` to whole vectors, into weights; returns their sum.
template <class A> A softmax(A* scores, const A* mask, int64_t padded) {
  Vector<A> most = Vector<A>{} + kNever<A>, total{};
  for (int64_t slot = 0; slot < padded; slot += kLanes<A>) {
    const Vector<A> shift = load<A, A>(mask + slot), score = load<A, A>(scores + slot) + shift;
    // What a mask hides is left out, whatever it holds.
    const Vector<A> kept = shift == kNever<A> ? shift : score;
    most = kept > most ? kept : most;
    std::memcpy(scores + slot, &kept, sizeof kept);
  }
  A highest = kNever<A>;
  for (int i = 0; i < kLanes<A>; ++i) highest = std::max(highest, most[i]);
  if (highest == kNever<A>) highest = 0;
  for (int64_t slot = 0; slot < padded; slot += kLanes<A>) {
    const Vector<A> weight = exponential<A>(load<A, A>(scores + slot) - highest);
    total += weight;
    std::memcpy(scores + slot, &weight, sizeof weight);
  }
  A sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += total[i];
  return sum;
}

// The weighted sums of the values for R rows, in D vectors of columns.
template <class T, class A, int R, int D>
void mix(const A* weights, int64_t padded, const T* value, const Sight* sight, int64_t slots, int64_t width, A* mixed) {
  Vector<A> acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) acc[r][d] = Vector<A>{};
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (sight[slot] == kUnseen) continue;
    Vector<A> from[D];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) from[d] = load<T, A>(value + slot * width + d * kLanes<A>);
    if (sight[slot] == kSeenBySome) {
      for (int r = 0; r < R; ++r)
        for (int d = 0; d < D && weights[r * padded + slot] != 0; ++d) acc[r][d] += weights[r * padded + slot] * from[d];
      continue;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) acc[r][d] += weights[r * padded + slot] * from[d];
  }
  for (int r = 0; r < R; ++r) std::memcpy(mixed + r * width, acc[r], sizeof acc[r]);
}

// The same for all columns.
template <class T, class A, int R>
void mix_rows(const A* weights, int64_t padded, const T* value, const Sight* sight, int64_t slots, int64_t width,
              A* mixed) {
  int64_t d = 0;
  for (; d + 2 * kLanes<A> <= width; d += 2 * kLanes<A>)
    mix<T, A, R, 2>(weights, padded, value + d, sight, slots, width, mixed + d);
  for (; d + kLanes<A> <= width; d += kLanes<A>)
    mix<T, A, R, 1>(weights, padded, value + d, sight, slots, width, mixed + d);
  for (; d < width; ++d)
    for (int r = 0; r < R; ++r) {
      A sum = 0;
      for (int64_t slot = 0; slot < slots; ++slot)
        if (weights[r * padded + slot] != 0) sum += weights[r * padded + slot] * A(widen(value[slot * width + d]));
      mixed[r * width + d] = sum;
    }
}

// Some heads' queries over the keys and values that they share.
template <class T, class A>
void attend(const A* scaled, const T* key, const T* value, const T* mask, T* out, const Shape& shape) {
  const int64_t rows = shape.heads * shape.queries, width = shape.width, slots = shape.slots;
  const int64_t padded = (slots + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
  const int64_t masks = shape.mask_head ? rows : shape.mask_query ? shape.queries : 1;  // that differ
  const Aligned<A> shifts(masks * padded), scores(rows * padded), mixed(rows * width);
  std::vector<Sight> sight(slots);
  std::vector<int> seen(slots);
  std::vector<Four<A>> sums(rows);
  const A hidden = A(std::is_same_v<T, Half> ? -65504.0 : std::is_same_v<T, double>
      ? double(std::numeric_limits<double>::lowest()) : -3.3895314e38);
  for (int64_t at = 0; at < masks; ++at) {
    const T* from = mask + at / shape.queries * shape.mask_head + at % shape.queries * shape.mask_query;
    for (int64_t slot = 0; slot < padded; ++slot) {
      const A shift = slot < slots ? A(widen(from[slot])) : kNever<A>;
      const bool hides = shift <= hidden;
      shifts.data[at * padded + slot] = hides ? kNever<A> : shift;
      if (slot < slots) seen[slot] += !hides;
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot)
    sight[slot] = seen[slot] == 0 ? kUnseen : seen[slot] == masks ? kSeenByAll : kSeenBySome;
  std::fill(scores.data, scores.data + rows * padded, A(0));
  for (int64_t slot = 0; slot < slots; slot += 4) {
    const int count = int(std::min<int64_t>(4, slots - slot));
    if (std::all_of(&sight[slot], &sight[slot] + count, [](Sight of) { return of == kUnseen; })) continue;
    std::fill(sums.begin(), sums.end(), Four<A>{});
    products<T, A, A>(count, key + slot * width, scaled, rows, width, sums.data());
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n((const A*)&sums[row], count, scores.data + row * padded + slot);
  }
  std::vector<A> totals(rows);
  for (int64_t row = 0; row < rows; ++row)
    totals[row] = softmax<A>(scores.data + row * padded, shifts.data + row % masks * padded, padded);
  for (int64_t row = 0, size; row < rows; row += size) {
    size = std::min(kTokens, rows - row);
    const A* weights = scores.data + row * padded;
    A* to = mixed.data + row * width;
    switch (size) {
      case 1: mix_rows<T, A, 1>(weights, padded, value, sight.data(), slots, width, to); break;
      case 2: mix_rows<T, A, 2>(weights, padded, value, sight.data(), slots, width, to); break;
      case 3: mix_rows<T, A, 3>(weights, padded, value, sight.data(), slots, width, to); break;
      case 4: mix_rows<T, A, 4>(weights, padded, value, sight.data(), slots, width, to); break;
      case 5: mix_rows<T, A, 5>(weights, padded, value, sight.data(), slots, width, to); break;
      case 6: mix_rows<T, A, 6>(weights, padded, value, sight.data(), slots, width, to); break;
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const A total = totals[row];
    T* to = out + row / shape.queries * shape.out_head + row % shape.queries * shape.out_query;
    for (int64_t d = 0; d < width; ++d)
      to[d] = narrow<T>(total > 0 || total != total ? mixed.data[row * width + d] / total : A(0));
  }
}

template <class T>
void attention_of(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale,
                  Tensor& output) {
  using A = typename SumOf<T>::type;
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t shared = key.size(1), slots = key.size(2), group = heads / shared;
  // Heads that share keys are taken together where that leaves work for all threads.
  const int64_t together = batch * shared >= 2 * omp_get_max_threads() ? group : 1;
  const int64_t mask_row = mask.size(0) > 1 ? mask.stride(0) : 0;
  const Shape shape{together, queries, slots, width, mask.size(1) > 1 ? mask.stride(1) : 0,
                    mask.size(2) > 1 ? mask.stride(2) : 0, width, heads * width};
  const T* q = static_cast<const T*>(query.data_ptr());
  const T* k = static_cast<const T*>(key.data_ptr());
  const T* v = static_cast<const T*>(value.data_ptr());
  const T* m = static_cast<const T*>(mask.data_ptr());
  T* out = static_cast<T*>(output.data_ptr());
#pragma omp parallel for schedule(dynamic) if (batch * heads * queries * slots * width > kSerial)
  for (int64_t unit = 0; unit < batch * heads / together; ++unit) {
    const int64_t row = unit * together / heads, head = unit * together % heads;
    const Aligned<A> scaled(together * queries * width);
    for (int64_t h = 0; h < together; ++h)
      for (int64_t at = 0; at < queries; ++at)
        for (int64_t d = 0; d < width; ++d)
          scaled.data[(h * queries + at) * width + d] = A(scale) * A(widen(
              q[row * query.stride(0) + (head + h) * query.stride(1) + at * query.stride(2) + d]));
    attend<T, A>(scaled.data, k + row * key.stride(0) + head / group * key.stride(1),
                 v + row * value.stride(0) + head / group * value.stride(1),
                 m + row * mask_row + head * shape.mask_head, out + (row * queries * heads + head) * width, shape);
  }
}

// `[B, H, Q, D]` over `[B, H_kv, S, D]`, with a mask `[B or 1, H or 1, Q or 1, S]` to be added, to `[B, Q, H, D]`. The
// last dimension of all is contiguous, and the last two of keys and values are.
Tensor attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
  Tensor output = empty(query, {query.size(0), query.size(2), query.size(1), query.size(3)});
  attention_of<NUMBER>(query, key, value, mask, scale, output);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
}
