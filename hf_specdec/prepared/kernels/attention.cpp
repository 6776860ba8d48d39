// Attention of few tokens.
//
// Keys and values are split into parts of some slots, which threads take in turn, so that each is read once for all the
// queries that share it. The results of the parts are joined as in FlashDecoding (Dao et al., 2023).

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "floats.h"
#include "tensors.h"
#include "transposed.h"

namespace {

template <class A> constexpr A kNever = -std::numeric_limits<A>::infinity();
constexpr int64_t kSlots = 128;  // of a part
constexpr int kMixed = kWide ? 4 : 2;  // vectors of a value's columns that are summed together

struct Shape {
  int64_t group, queries, width;  // query heads that share a head of keys, queries of each, columns of a head
  int64_t mask_head, mask_query;  // strides
  int64_t rows() const { return group * queries; }
};

enum Sight : uint8_t { kUnseen, kSeenBySome, kSeenByAll };  // whether queries see a slot

// The results of rows of queries over one part of the slots, or over all.
template <class A> struct Result {
  A* highest;  // score, or −inf if nothing is seen
  A* total;    // of the weights e^(score − highest)
  A* mixed;    // `[rows, width]`: the sums of the values by weight
};

// The memory in which a thread works on a part.
template <class A> struct Room {
  explicit Room(const Shape& shape)
      : padded((shape.width + kLanes<A> - 1) / kLanes<A> * kLanes<A>), scaled(shape.rows() * padded),
        shifts(shape.rows() * kSlots), scores(shape.rows() * kSlots), sums(shape.rows()) {}
  const int64_t padded;  // columns of a head, as whole vectors
  Aligned<A> scaled, shifts, scores;  // queries `[rows, padded]`; the mask's numbers and the scores `[rows, 128]`
  std::vector<Four<A>> sums;
  Sight sight[kSlots];
};

// What a mask adds to hide a slot, or more.
template <class T> constexpr SumOf<T> hidden_from() {
  return std::is_same_v<T, Half> ? -65504.0 : std::is_same_v<T, double>
      ? double(std::numeric_limits<double>::lowest()) : -3.3895314e38;
}

// Reads the mask of some slots. Several rows may share one mask.
template <class T, class A>
void look(const T* mask, const Shape& shape, int64_t masks, int64_t slots, Room<A>& room) {
  const A hidden = hidden_from<T>();
  const Vector<A> never(kNever<A>), none(A(0)), one(A(1));
  A seen[kSlots] = {};
  for (int64_t at = 0; at < masks; ++at) {
    const T* from = mask + at / shape.queries * shape.mask_head + at % shape.queries * shape.mask_query;
    A* to = room.shifts.data + at * kSlots;
    int64_t slot = 0;
    for (; slot + kLanes<A> <= slots; slot += kLanes<A>) {
      const Vector<A> shift = load<A>(from + slot), hides = shift <= Vector<A>(hidden);
      Vector<A>::blendv(shift, never, hides).store(to + slot);
      (Vector<A>::loadu(seen + slot) + Vector<A>::blendv(one, none, hides)).store(seen + slot);
    }
    for (; slot < slots; ++slot) {
      const bool hides = A(from[slot]) <= hidden;
      to[slot] = hides ? kNever<A> : A(from[slot]);
      seen[slot] += !hides;
    }
    std::fill(to + slots, to + kSlots, kNever<A>);
  }
  for (int64_t slot = 0; slot < kSlots; ++slot)
    room.sight[slot] = seen[slot] == 0 ? kUnseen : seen[slot] == masks ? kSeenByAll : kSeenBySome;
}

// Computes the scores of some slots; meanwhile prefetches their values.
template <class T, class A>
void score(const T* key, const T* value, const Shape& shape, int64_t slots, Room<A>& room) {
  const int64_t rows = shape.rows(), width = shape.width;
  for (int64_t slot = 0; slot < slots; slot += 4) {
    const int64_t count = std::min<int64_t>(4, slots - slot);
    std::fill(room.sums.begin(), room.sums.end(), Four<A>{});
    if (std::any_of(room.sight + slot, room.sight + slot + count, [](Sight of) { return of != kUnseen; })) {
      const T* keys[4];  // the last one stands for missing ones
      for (int64_t r = 0; r < 4; ++r) keys[r] = key + (slot + std::min(r, count - 1)) * width;
      multiply_four<FloatProduct<T, A>>(
          keys, {room.scaled.data, room.padded}, rows, 0, width,
          [&](bool last, auto r, int64_t i) __attribute__((always_inline)) {
            if (last) __builtin_prefetch(value + (slot + r) * width + i, 0, kReadAgain);
          },
          room.sums.data());
    }
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(room.scores.data + row * kSlots + slot, &room.sums[row], sizeof(Four<A>));
  }
}

// Turns a row's scores into weights; returns the highest score and the sum of the weights. Masked slots are left out,
// whatever they hold.
template <class A> std::pair<A, A> softmax(A* scores, const A* shifts) {
  const Vector<A> never(kNever<A>);
  Vector<A> most = never;
  for (int64_t slot = 0; slot < kSlots; slot += kLanes<A>) {
    const Vector<A> shift = Vector<A>::loadu(shifts + slot), score = Vector<A>::loadu(scores + slot) + shift;
    const Vector<A> kept = Vector<A>::blendv(score, never, shift == never);
    most = at::vec::maximum(most, kept);
    kept.store(scores + slot);
  }
  const A highest = at::vec::vec_reduce_all<A>([](auto a, auto b) { return at::vec::maximum(a, b); }, most);
  const Vector<A> zero(highest == kNever<A> ? A(0) : highest);
  Vector<A> sums;
  for (int64_t slot = 0; slot < kSlots; slot += kLanes<A>) {
    const Vector<A> weights = (Vector<A>::loadu(scores + slot) - zero).exp_u20();
    sums = sums + weights;
    weights.store(scores + slot);
  }
  return {highest, sum_of<A>(sums)};
}

// Values as the columns of a block whose rows are weights: `at(vector, slot)`.
template <class T, class A> struct Values {
  INLINE Vector<A> at(int64_t vector, int64_t slot) const { return load<A>(data + slot * width + vector * kLanes<A>); }
  const T* data;
  int64_t width;
};

// Adds the weighted values of some slots, for R rows, in D vectors of columns.
template <class T, class A, int R, int D>
void mix(const A* weights, const T* value, int64_t begin, int64_t end, int64_t width, A* mixed) {
  const A* rows[R];
  Vector<A> sums[R][D];
  for (int r = 0; r < R; ++r) rows[r] = weights + r * kSlots;
  each<R>([&](auto r) { each<D>([&](auto d) { sums[r][d] = Vector<A>::loadu(mixed + r * width + d * kLanes<A>); }); });
  multiply<BroadcastProduct<A>, R, D>(rows, Values<T, A>{value, width}, 0, begin, end, fetch_nothing, sums);
  each<R>([&](auto r) { each<D>([&](auto d) { sums[r][d].store(mixed + r * width + d * kLanes<A>); }); });
}

// The same for all columns.
template <class T, class A, int R>
void mix_rows(const A* weights, const T* value, int64_t begin, int64_t end, int64_t width, A* mixed) {
  int64_t d = 0;
  for (; d + kMixed * kLanes<A> <= width; d += kMixed * kLanes<A>)
    mix<T, A, R, kMixed>(weights, value + d, begin, end, width, mixed + d);
  for (; d + kLanes<A> <= width; d += kLanes<A>) mix<T, A, R, 1>(weights, value + d, begin, end, width, mixed + d);
  for (; d < width; ++d)
    for (int r = 0; r < R; ++r)
      for (int64_t slot = begin; slot < end; ++slot)
        mixed[r * width + d] += weights[r * kSlots + slot] * A(value[slot * width + d]);
}

// Attends with some rows of queries to some slots; `room` holds the scaled queries and the mask.
template <class T, class A>
void attend(const T* key, const T* value, const Shape& shape, int64_t masks, int64_t slots, Room<A>& room,
            const Result<A>& result) {
  const int64_t rows = shape.rows(), width = shape.width;
  score<T, A>(key, value, shape, slots, room);
  for (int64_t row = 0; row < rows; ++row)
    std::tie(result.highest[row], result.total[row]) =
        softmax<A>(room.scores.data + row * kSlots, room.shifts.data + row % masks * kSlots);
  std::fill_n(result.mixed, rows * width, A(0));
  for (int64_t slot = 0, end; slot < slots; slot = end) {
    const Sight sight = room.sight[slot];
    end = std::find_if(room.sight + slot, room.sight + slots, [&](Sight of) { return of != sight; }) - room.sight;
    const auto some = [&](int64_t row, int64_t count, int64_t from, int64_t to) {
      for_constant<kTokens>(count, [&](auto n) {
        mix_rows<T, A, n>(room.scores.data + row * kSlots, value, from, to, width, result.mixed + row * width);
      });
    };
    if (sight == kSeenByAll)
      for_groups(rows, kTokens, [&](int64_t row, int64_t count, bool) { some(row, count, slot, end); });
    for (int64_t at = slot; sight == kSeenBySome && at < end; ++at)
      for (int64_t row = 0; row < rows; ++row)
        if (room.scores.data[row * kSlots + at] != 0) some(row, 1, at, at + 1);
  }
}

// One row's result over all parts, each of which holds `rows`. A row that sees nothing becomes zeros.
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
  A* first = of.mixed;
  for (int64_t d = 0; d < width; ++d) first[d] *= shares[0];
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t d = 0; d < width; ++d) first[d] += shares[part] * of.mixed[part * rows * width + d];
  for (int64_t d = 0; d < width; ++d) out[d] = T(first[d] * whole);
}

// A tensor `[B, H, S, D]`, possibly the same for all rows, heads or slots.
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

// The number of slots up to the last one that any query sees, in whole parts: a cache may have many more.
template <class T> int64_t slots_in_use(const Heads<T>& masks, Given mask, int64_t slots) {
  using A = SumOf<T>;
  const auto seen = [&](const T* from, int64_t count) {
    Vector<A> most(hidden_from<T>());
    int64_t slot = 0;
    for (; slot + kLanes<A> <= count; slot += kLanes<A>) most = at::vec::maximum(most, load<A>(from + slot));
    A highest = at::vec::vec_reduce_all<A>([](auto a, auto b) { return at::vec::maximum(a, b); }, most);
    for (; slot < count; ++slot) highest = std::max(highest, A(from[slot]));
    return !(highest <= hidden_from<T>());
  };
  for (int64_t begin = (slots - 1) / kSlots * kSlots; begin > 0; begin -= kSlots)
    for (int64_t row = 0; row < mask.size(0); ++row)
      for (int64_t head = 0; head < mask.size(1); ++head)
        for (int64_t query = 0; query < mask.size(2); ++query)
          if (seen(masks.at(row, head, query) + begin, std::min(kSlots, slots - begin)))
            return std::min(begin + kSlots, slots);
  return std::min(kSlots, slots);
}

// Attention of queries `[B, H, Q, D]` to keys and values `[B, H_kv, S, D]` with an additive mask `[B or 1, H or 1, Q or 1,
// S]`; returns `[B, Q, H, D]`. The last dimension must be contiguous, for keys and values the last two.
template <class T>
void attention(Given query, Given key, Given value, Given mask, double scale, Handle* output) {
  using A = SumOf<T>;
  const Heads<T> q(query), k(key), v(value), m(mask);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t shared = key.size(1), slots = slots_in_use(m, mask, key.size(2)), parts = (slots + kSlots - 1) / kSlots;
  const Shape shape{heads / shared, queries, width, m.strides[1], m.strides[2]};
  const int64_t rows = shape.rows(), masks = m.strides[1] ? rows : m.strides[2] ? queries : 1;
  const int64_t units = batch * shared * parts;
  const int64_t sizes[] = {batch, queries, heads, width};
  *output = empty(query.type(), 4, sizes).handle;
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
      for (int64_t at = 0; at < rows; ++at) {
        const T* query = q.at(row, first + at / queries, at % queries);
        A* to = room.scaled.data + at * room.padded;
        for (int64_t d = 0; d < width; ++d) to[d] = A(query[d]) * A(scale);
        std::fill(to + width, to + room.padded, A(0));
      }
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
