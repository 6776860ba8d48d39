// Attention of few tokens.
//
// Keys and values are cut into parts of some slots, which threads take in turn, so that each is read once for all the
// queries that share it. What the parts come to is joined as in FlashDecoding (Dao et al., 2023).

namespace {

constexpr int64_t kSlots = 128;  // of a part
#ifdef __AVX512F__
constexpr int kMixed = 4;  // vectors of a value's columns that are summed at a time
#else
constexpr int kMixed = 2;
#endif

struct Shape {
  int64_t group, queries, width;  // heads of queries that share a head of keys, queries of each, columns of a head
  int64_t mask_head, mask_query;  // strides
  int64_t rows() const { return group * queries; }
};

enum Sight : uint8_t { kUnseen, kSeenBySome, kSeenByAll };  // of a slot, by the rows of queries

// What rows of queries come to over one part of the slots, or over all.
template <class A> struct Result {
  A* highest;  // score, or −inf where nothing is seen
  A* total;    // of the weights e^(score − highest)
  A* mixed;    // `[rows, width]`: the sums of the values by weight
};

// Where a thread works on a part.
template <class A> struct Room {
  explicit Room(const Shape& shape)
      : scaled(shape.rows() * shape.width), shifts(shape.rows() * kSlots), scores(shape.rows() * kSlots),
        sums(shape.rows()) {}
  Aligned<A> scaled, shifts, scores;  // queries `[rows, width]`; what is added to scores and scores `[rows, 128]`
  std::vector<Four<A>> sums;
  Sight sight[kSlots];
};

template <class T, class A> void scaled_copy(const T* from, A scale, int64_t width, A* to) {
  int64_t d = 0;
  for (; d + kLanes<A> <= width; d += kLanes<A>) {
    const Vector<A> scaled = load<T, A>(from + d) * scale;
    std::memcpy(to + d, &scaled, sizeof scaled);
  }
  for (; d < width; ++d) to[d] = A(widen(from[d])) * scale;
}

// Reads the mask of some slots. Masks of several rows may be one.
template <class T, class A>
void look(const T* mask, const Shape& shape, int64_t masks, int64_t slots, Room<A>& room) {
  const A hidden = A(std::is_same_v<T, Half> ? -65504.0 : std::is_same_v<T, double>
      ? double(std::numeric_limits<double>::lowest()) : -3.3895314e38);
  const Vector<A> never = Vector<A>{} + kNever<A>;
  A seen[kSlots] = {};
  for (int64_t at = 0; at < masks; ++at) {
    const T* from = mask + at / shape.queries * shape.mask_head + at % shape.queries * shape.mask_query;
    A* to = room.shifts.data + at * kSlots;
    int64_t slot = 0;
    for (; slot + kLanes<A> <= slots; slot += kLanes<A>) {
      const Vector<A> shift = load<T, A>(from + slot), kept = shift <= hidden ? never : shift;
      const Vector<A> count = load<A, A>(seen + slot) + (shift <= hidden ? Vector<A>{} : Vector<A>{} + A(1));
      std::memcpy(to + slot, &kept, sizeof kept);
      std::memcpy(seen + slot, &count, sizeof count);
    }
    for (; slot < kSlots; ++slot) {
      const A shift = slot < slots ? A(widen(from[slot])) : kNever<A>;
      to[slot] = shift <= hidden ? kNever<A> : shift;
      seen[slot] += !(shift <= hidden);
    }
  }
  for (int64_t slot = 0; slot < kSlots; ++slot)
    room.sight[slot] = seen[slot] == 0 ? kUnseen : seen[slot] == masks ? kSeenByAll : kSeenBySome;
}

// Scores of some slots; meanwhile their values are fetched from memory.
template <class T, class A>
void score(const T* key, const T* value, const Shape& shape, int64_t slots, Room<A>& room) {
  const int64_t rows = shape.rows(), width = shape.width;
  for (int64_t slot = 0; slot < slots; slot += 4) {
    const int count = int(std::min<int64_t>(4, slots - slot));
    std::fill(room.sums.begin(), room.sums.end(), Four<A>{});
    const T *keys = key + slot * width, *values = value + slot * width;
    const bool seen = std::any_of(room.sight + slot, room.sight + slot + count, [](Sight of) { return of != kUnseen; });
    if (seen && count < 4) {
      products<T, A, A>(count, keys, width, room.scaled.data, rows, width, room.sums.data());
    } else if (seen) {
      for_token_groups(rows, 1, [&](int64_t row, int64_t size, bool last) {
        const A* queries = room.scaled.data + row * width;
        tile_of<T, A, A>(size, keys, width, queries, width, width, last ? values : nullptr, room.sums.data() + row);
      });
    }
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(room.scores.data + row * kSlots + slot, &room.sums[row], sizeof(Four<A>));
  }
}

// Turns a row's scores into weights; returns the highest score and the weights' sum.
template <class A> std::pair<A, A> softmax(A* scores, const A* shifts) {
  Vector<A> most = Vector<A>{} + kNever<A>, total{};
  for (int64_t slot = 0; slot < kSlots; slot += kLanes<A>) {
    const Vector<A> shift = load<A, A>(shifts + slot), score = load<A, A>(scores + slot) + shift;
    // What a mask hides is left out, whatever it holds.
    const Vector<A> kept = shift == kNever<A> ? shift : score;
    most = kept > most ? kept : most;
    std::memcpy(scores + slot, &kept, sizeof kept);
  }
  const Four<A> highest_of = fold<A>(most, [](auto a, auto b) { return a > b ? a : b; });
  const A highest = std::max(std::max(highest_of[0], highest_of[1]), std::max(highest_of[2], highest_of[3]));
  for (int64_t slot = 0; slot < kSlots; slot += kLanes<A>) {
    const Vector<A> weight = exponential<A>(load<A, A>(scores + slot) - (highest == kNever<A> ? A(0) : highest));
    total += weight;
    std::memcpy(scores + slot, &weight, sizeof weight);
  }
  const Four<A> sums = fold<A>(total);
  return {highest, sums[0] + sums[1] + (sums[2] + sums[3])};
}

// The weighted sums of the values for R rows, in D vectors of columns.
template <class T, class A, int R, int D>
void mix(const A* weights, const T* value, const Sight* sight, int64_t slots, int64_t width, A* mixed) {
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
        for (int d = 0; d < D && weights[r * kSlots + slot] != 0; ++d)
          acc[r][d] += weights[r * kSlots + slot] * from[d];
      continue;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) acc[r][d] += weights[r * kSlots + slot] * from[d];
  }
  for (int r = 0; r < R; ++r) std::memcpy(mixed + r * width, acc[r], sizeof acc[r]);
}

// The same for all columns.
template <class T, class A, int R>
void mix_rows(const A* weights, const T* value, const Sight* sight, int64_t slots, int64_t width, A* mixed) {
  int64_t d = 0;
  for (; d + kMixed * kLanes<A> <= width; d += kMixed * kLanes<A>)
    mix<T, A, R, kMixed>(weights, value + d, sight, slots, width, mixed + d);
  for (; d + kLanes<A> <= width; d += kLanes<A>)
    mix<T, A, R, 1>(weights, value + d, sight, slots, width, mixed + d);
  for (; d < width; ++d)
    for (int r = 0; r < R; ++r) {
      A sum = 0;
      for (int64_t slot = 0; slot < slots; ++slot)
        if (weights[r * kSlots + slot] != 0) sum += weights[r * kSlots + slot] * A(widen(value[slot * width + d]));
      mixed[r * width + d] = sum;
    }
}

// Some rows of queries, `scaled` in the room, over some slots, of which the room has the mask.
template <class T, class A>
void attend(const T* key, const T* value, const Shape& shape, int64_t masks, int64_t slots, Room<A>& room,
            const Result<A>& result) {
  const int64_t rows = shape.rows(), width = shape.width;
  score<T, A>(key, value, shape, slots, room);
  for (int64_t row = 0; row < rows; ++row)
    std::tie(result.highest[row], result.total[row]) =
        softmax<A>(room.scores.data + row * kSlots, room.shifts.data + row % masks * kSlots);
  for (int64_t row = 0, size; row < rows; row += size) {
    size = std::min(kTokens, rows - row);
    const A* weights = room.scores.data + row * kSlots;
    A* to = result.mixed + row * width;
    switch (size) {
      case 1: mix_rows<T, A, 1>(weights, value, room.sight, slots, width, to); break;
      case 2: mix_rows<T, A, 2>(weights, value, room.sight, slots, width, to); break;
      case 3: mix_rows<T, A, 3>(weights, value, room.sight, slots, width, to); break;
      case 4: mix_rows<T, A, 4>(weights, value, room.sight, slots, width, to); break;
      case 5: mix_rows<T, A, 5>(weights, value, room.sight, slots, width, to); break;
      case 6: mix_rows<T, A, 6>(weights, value, room.sight, slots, width, to); break;
    }
  }
}

// One row's result over all parts, of which each holds `rows`. A row that sees nothing is zeros.
template <class T, class A>
void join(const Result<A>& of, int64_t parts, int64_t rows, int64_t width, A* shares, T* out) {
  A highest = kNever<A>, total = 0;
  for (int64_t part = 0; part < parts; ++part) highest = std::max(highest, of.highest[part * rows]);
  for (int64_t part = 0; part < parts; ++part) {
    const A seen = of.total[part * rows];
    shares[part] = seen == 0 ? A(0) : std::exp(of.highest[part * rows] - highest);
    total += shares[part] * seen;
  }
  const A whole = total == 0 ? A(0) : 1 / total;
  int64_t d = 0;
  for (; d + kLanes<A> <= width; d += kLanes<A>) {
    Vector<A> mixed{};
    for (int64_t part = 0; part < parts; ++part) mixed += shares[part] * load<A, A>(of.mixed + part * rows * width + d);
    mixed *= whole;
    if constexpr (std::is_same_v<T, A>) std::memcpy(out + d, &mixed, sizeof mixed);
    else for (int i = 0; i < kLanes<A>; ++i) out[d + i] = narrow<T>(mixed[i]);
  }
  for (; d < width; ++d) {
    A mixed = 0;
    for (int64_t part = 0; part < parts; ++part) mixed += shares[part] * of.mixed[part * rows * width + d];
    out[d] = narrow<T>(mixed * whole);
  }
}

// A tensor `[B, H, S, D]`, or the same for all rows, heads or slots.
template <class T> struct Heads {
  explicit Heads(Given of) : data(pointer<const T>(of)) {
    for (int dim = 0; dim < 3; ++dim) strides[dim] = of.size(dim) > 1 ? of.stride(dim) : 0;
  }
  const T* at(int64_t row, int64_t head, int64_t slot) const {
    return data + row * strides[0] + head * strides[1] + slot * strides[2];
  }
  const T* data;
  int64_t strides[3];
};

// `[B, H, Q, D]` over `[B, H_kv, S, D]`, with a mask `[B or 1, H or 1, Q or 1, S]` to be added: `[B, Q, H, D]`. The last
// dimension of all is contiguous, and the last two of keys and values are.
template <class T>
void attention(Given query, Given key, Given value, Given mask, double scale, Handle* output) {
  using A = typename SumOf<T>::type;
  const Heads<T> q(query), k(key), v(value), m(mask);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t shared = key.size(1), slots = key.size(2), parts = (slots + kSlots - 1) / kSlots;
  const Shape shape{heads / shared, queries, width, m.strides[1], m.strides[2]};
  const int64_t rows = shape.rows(), masks = m.strides[1] ? rows : m.strides[2] ? queries : 1;
  const int64_t units = batch * shared * parts;
  const int64_t sizes[] = {batch, queries, heads, width};
  *output = empty(query, 4, sizes).handle;
  T* out = pointer<T>(Given(*output));
  const Aligned<A> highest(units * rows), totals(units * rows), mixed(units * rows * width);
  const auto result = [&](int64_t unit, int64_t row) {
    const int64_t at = unit * rows + row;
    return Result<A>{highest.data + at, totals.data + at, mixed.data + at * width};
  };
#pragma omp parallel if (batch * heads * queries * slots * width > kSerial)
  {
    Room<A> room(shape);
    const Aligned<A> shares(parts);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) {
      const int64_t row = unit / parts / shared, head = unit / parts % shared, from = unit % parts * kSlots;
      const int64_t count = std::min(kSlots, slots - from), first = head * shape.group;
      for (int64_t at = 0; at < rows; ++at)
        scaled_copy<T, A>(q.at(row, first + at / queries, at % queries), A(scale), width,
                          room.scaled.data + at * width);
      look<T, A>(m.at(row, first, 0) + from, shape, masks, count, room);
      attend<T, A>(k.at(row, head, from), v.at(row, head, from), shape, masks, count, room, result(unit, 0));
    }
#pragma omp for nowait
    for (int64_t at = 0; at < batch * heads * queries; ++at) {
      const int64_t row = at / queries / heads, head = at / queries % heads, token = at % queries;
      const int64_t unit = (row * shared + head / shape.group) * parts;
      join<T, A>(result(unit, head % shape.group * queries + token), parts, rows, width, shares.data,
                 out + ((row * queries + token) * heads + head) * width);
    }
  }
}

}  // namespace

NAMED(attention)(Handle query, Handle key, Handle value, Handle mask, double scale, Handle* output) {
  return reported([=] { attention<NUMBER>(query, key, value, mask, scale, output); });
}

namespace {

using Attention = Operation<FUNCTION(attention), 1, Tensor, Tensor, Tensor, Tensor, double>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hf_specdec, library) {
  library.def(OPERATION("attention") "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl(OPERATION("attention"), TORCH_BOX(&Attention::run));
}
