#include "collectives/plan.h"

#include <algorithm>
#include <functional>
#include <optional>

#include "base/bytes.h"

namespace rejoin::collectives {

namespace {

constexpr std::uint64_t kDirectBytes = 32 * KiB;  // up to here everyone sends to everyone, in groups of …
constexpr std::uint32_t kDirectMembers = 8;
constexpr std::uint64_t kTreeBytes = 64 * KiB;  // a broadcast of more than that goes along a chain
constexpr std::uint32_t kSlots = 8;             // of scratch memory, for chunks that are added and gone

using Number = std::uint32_t;  // of a task

class Builder {
 public:
  // `memories`: how many the operation has; scratch memory is the one after these.
  explicit Builder(const Shape& shape, std::uint32_t memories = 1) : shape_(shape), memories_(memories) {}

  Number send(std::uint32_t peer, Operand at, std::uint64_t length) {
    return add({.kind = Task::Kind::send, .peer = peer, .at = at, .length = length});
  }
  Number receive(std::uint32_t peer, Operand at, std::uint64_t length) {
    return add({.kind = Task::Kind::receive, .peer = peer, .at = at, .length = length});
  }
  Number combine(Operand at, Operand first, Operand second, std::uint64_t length, bool last) {
    return add(
        {.kind = Task::Kind::combine, .at = at, .first = first, .second = second, .length = length, .last = last});
  }
  Number copy(Operand at, Operand from, std::uint64_t length) {
    return add({.kind = Task::Kind::copy, .at = at, .first = from, .length = length});
  }
  // `task` waits for the other.
  void after(Number task, std::optional<Number> other) {
    if (!other) return;
    plan_.tasks[*other].unblocks.push_back(task);
    ++plan_.tasks[task].blockers;
  }
  Operand take_scratch(std::uint64_t bytes) {
    const Operand at{memories_, plan_.scratch};
    plan_.scratch += round_up(bytes, 64);
    return at;
  }
  std::uint32_t member(std::int64_t offset) const {  // so many to the right of this one
    const auto n = static_cast<std::int64_t>(shape_.members);
    return static_cast<std::uint32_t>(((shape_.rank + offset) % n + n) % n);
  }
  Plan plan() { return std::move(plan_); }

 private:
  Number add(Task task) {
    plan_.tasks.push_back(std::move(task));
    return static_cast<Number>(plan_.tasks.size() - 1);
  }
  const Shape shape_;
  const std::uint32_t memories_;
  Plan plan_;
};

Operand behind(const Operand& operand, std::uint64_t bytes) { return {operand.memory, operand.offset + bytes}; }

struct Range {
  std::uint64_t offset = 0, length = 0;
};

// Of what is to be cut: the same number of chunks for each segment, so that a ring's rounds have as many each. Chunks
// may be empty; no task is made of these.
class Cut {
 public:
  // One memory in as many segments as there are members …
  explicit Cut(const Shape& shape) : Cut(shape, segments_of(shape)) {}
  // … or memories that are segments.
  Cut(const Shape& shape, std::vector<std::uint64_t> lengths) : lengths_(std::move(lengths)) {
    for (std::uint64_t at = 0; const auto length : lengths_) {
      begins_.push_back(at);
      at += length;
    }
    const auto longest = *std::max_element(lengths_.begin(), lengths_.end());
    // Several, so that the rounds overlap, but none so small that its messages cost more than it.
    const auto wanted = std::clamp(longest / 4, std::min<std::uint64_t>(64 * KiB, shape.chunk), shape.chunk);
    chunk_ = round_up(std::max<std::uint64_t>(wanted, 1), shape.element);
    chunks_ = static_cast<std::uint32_t>((longest + chunk_ - 1) / chunk_);
  }
  std::uint32_t chunks() const { return chunks_; }
  std::uint64_t chunk_bytes() const { return chunk_; }
  std::uint64_t length(std::uint32_t segment) const { return lengths_[segment]; }
  std::uint64_t begin(std::uint32_t segment) const { return begins_[segment]; }  // of it, in one memory of all
  Range chunk(std::uint32_t segment, std::uint32_t c) const {                    // from the segment's begin
    const auto offset = std::min(c * chunk_, lengths_[segment]);
    return {offset, std::min(chunk_, lengths_[segment] - offset)};
  }

 private:
  static std::vector<std::uint64_t> segments_of(const Shape& shape) {
    const auto longest = round_up((shape.bytes + shape.members - 1) / shape.members, std::uint64_t{64} * shape.element);
    std::vector<std::uint64_t> lengths;
    for (std::uint64_t left = shape.bytes; lengths.size() < shape.members; left -= lengths.back())
      lengths.push_back(std::min(longest, left));
    return lengths;
  }
  std::vector<std::uint64_t> lengths_, begins_;
  std::uint64_t chunk_ = 1;
  std::uint32_t chunks_ = 0;
};

// Which task a chunk of a segment last went through, so that the next one waits for it.
struct Chunks {
  explicit Chunks(const Cut& cut, std::uint32_t segments) : chunks(cut.chunks()), of(segments * chunks) {}
  std::optional<Number>& operator()(std::uint32_t segment, std::uint32_t c) { return of[segment * chunks + c]; }
  std::uint32_t chunks;
  std::vector<std::optional<Number>> of;
};

using Where = std::function<Operand(std::uint32_t segment, const Range& chunk)>;

// In round k, 0 … members − 2, rank p sends segment p−1−k to its right and adds what comes from its left, segment
// p−2−k, to its own; at the end it has segment p of all. `own` is where its own addends are and `into` where sums go:
// in place if they are the same; else into scratch memory, but for the last. `sent` and `summed` are filled.
void ring_reduce_scatter(Builder& builder, const Shape& shape, const Cut& cut, const Where& own, const Where& into_last,
                         bool in_place, Chunks& sent, Chunks& summed) {
  const auto left = builder.member(-1), right = builder.member(1);
  // A sum that waits in its slot to be sent is longest there when a whole segment is before it.
  const auto all = std::uint64_t{shape.members - 1} * cut.chunks();
  const auto slots =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(in_place ? kSlots : cut.chunks() + kSlots, all));
  const auto scratch = builder.take_scratch(slots * cut.chunk_bytes());
  std::vector<std::optional<Number>> slot_free(slots);
  std::vector<Operand> partial(cut.chunks());
  for (std::uint32_t k = 0, received = 0; k + 1 < shape.members; ++k) {
    const auto out = builder.member(-1 - static_cast<std::int64_t>(k));
    const auto in = builder.member(-2 - static_cast<std::int64_t>(k));
    const bool last = k + 2 == shape.members;
    for (std::uint32_t c = 0; c < cut.chunks(); ++c) {
      const auto here = cut.chunk(out, c);
      if (here.length == 0) continue;
      const auto send = builder.send(right, k == 0 || in_place ? own(out, here) : partial[c], here.length);
      if (k > 0) builder.after(send, summed(out, c));
      sent(out, c) = send;
      if (k > 0 && !in_place) slot_free[(received + c - cut.chunks()) % slots] = send;
    }
    for (std::uint32_t c = 0; c < cut.chunks(); ++c, ++received) {
      const auto here = cut.chunk(in, c);
      if (here.length == 0) continue;
      const auto slot = behind(scratch, (received % slots) * cut.chunk_bytes());
      const auto arrived = builder.receive(left, slot, here.length);
      builder.after(arrived, slot_free[received % slots]);
      const auto sum = in_place ? own(in, here) : last ? into_last(in, here) : slot;
      const auto added = builder.combine(sum, own(in, here), slot, here.length, last);
      builder.after(added, arrived);
      summed(in, c) = added;
      partial[c] = sum;
      slot_free[received % slots] = added;
    }
  }
}

// In round k rank p sends segment p−k to its right and gets segment p−1−k from its left. `here_after`: what each chunk
// waits for before it may be sent; `free_after`: … received.
void ring_all_gather(Builder& builder, const Shape& shape, const Cut& cut, const Where& where, Chunks& here_after,
                     Chunks& free_after) {
  const auto left = builder.member(-1), right = builder.member(1);
  for (std::uint32_t k = 0; k + 1 < shape.members; ++k) {
    const auto out = builder.member(-static_cast<std::int64_t>(k)),
               in = builder.member(-1 - static_cast<std::int64_t>(k));
    for (std::uint32_t c = 0; c < cut.chunks(); ++c) {
      const auto range = cut.chunk(out, c);
      if (range.length == 0) continue;
      builder.after(builder.send(right, where(out, range), range.length), here_after(out, c));
    }
    for (std::uint32_t c = 0; c < cut.chunks(); ++c) {
      const auto range = cut.chunk(in, c);
      if (range.length == 0) continue;
      const auto arrived = builder.receive(left, where(in, range), range.length);
      builder.after(arrived, free_after(in, c));
      here_after(in, c) = arrived;
    }
  }
}

// Everyone's bytes come into scratch memory, and are added in the order of ranks.
void combine_in_order(Builder& builder, const Shape& shape, const std::vector<Number>& before_the_result) {
  const auto scratch = builder.take_scratch(shape.members * round_up(shape.bytes, 64));
  const auto slot = [&](std::uint32_t rank) { return behind(scratch, rank * round_up(shape.bytes, 64)); };
  std::vector<std::optional<Number>> arrived(shape.members);
  for (std::uint32_t rank = 0; rank < shape.members; ++rank)
    if (rank != shape.rank) arrived[rank] = builder.receive(rank, slot(rank), shape.bytes);
  const auto of = [&](std::uint32_t rank) { return rank == shape.rank ? Operand{} : slot(rank); };
  std::optional<Number> added;
  Operand sum = of(0);
  for (std::uint32_t rank = 1; rank < shape.members; ++rank) {
    const bool last = rank + 1 == shape.members;
    const auto task = builder.combine(last ? Operand{} : slot(0), sum, of(rank), shape.bytes, last);
    builder.after(task, arrived[rank]);
    builder.after(task, rank == 1 ? arrived[0] : added);
    if (last)
      for (const auto other : before_the_result) builder.after(task, other);
    added = task;
    sum = slot(0);
  }
}

bool direct(const Shape& shape) { return shape.bytes <= kDirectBytes && shape.members <= kDirectMembers; }

}  // namespace

Plan all_reduce(const Shape& shape) {
  Builder builder(shape);
  if (shape.members == 1 || shape.bytes == 0) return {};
  if (direct(shape)) {
    std::vector<Number> sent;
    for (std::uint32_t rank = 0; rank < shape.members; ++rank)
      if (rank != shape.rank) sent.push_back(builder.send(rank, {}, shape.bytes));
    combine_in_order(builder, shape, sent);
    return builder.plan();
  }
  const Cut cut(shape);
  const Where where = [&](std::uint32_t segment, const Range& chunk) {
    return Operand{0, cut.begin(segment) + chunk.offset};
  };
  Chunks sent(cut, shape.members), summed(cut, shape.members);
  ring_reduce_scatter(builder, shape, cut, where, where, true, sent, summed);
  Chunks here(cut, shape.members);
  for (std::uint32_t c = 0; c < cut.chunks(); ++c) here(shape.rank, c) = summed(shape.rank, c);
  ring_all_gather(builder, shape, cut, where, here, sent);
  return builder.plan();
}

Plan reduce(const Shape& shape) {
  Builder builder(shape);
  if (shape.members == 1 || shape.bytes == 0) return {};
  if (direct(shape)) {
    if (shape.rank != shape.root) builder.send(shape.root, {}, shape.bytes);
    else combine_in_order(builder, shape, {});
    return builder.plan();
  }
  const Cut cut(shape);
  const Where own = [&](std::uint32_t segment, const Range& chunk) {
    return Operand{0, cut.begin(segment) + chunk.offset};
  };
  const bool root = shape.rank == shape.root;
  const auto result = root ? Operand{} : builder.take_scratch(cut.length(shape.rank));
  // The root's own segment may go in place at once: nobody sends it any more.
  const Where into = [&](std::uint32_t segment, const Range& chunk) {
    return root ? own(segment, chunk) : behind(result, chunk.offset);
  };
  Chunks sent(cut, shape.members), summed(cut, shape.members);
  ring_reduce_scatter(builder, shape, cut, own, into, false, sent, summed);
  for (std::uint32_t segment = 0; segment < shape.members; ++segment) {
    if (segment == shape.root || (!root && segment != shape.rank)) continue;
    for (std::uint32_t c = 0; c < cut.chunks(); ++c) {
      const auto range = cut.chunk(segment, c);
      if (range.length == 0) continue;
      if (!root) {
        builder.after(builder.send(shape.root, into(segment, range), range.length), summed(segment, c));
        continue;
      }
      const auto arrived = builder.receive(segment, own(segment, range), range.length);
      // What is there is an addend, and the first segment of the ring is sent from there.
      builder.after(arrived, summed(segment, c));
      builder.after(arrived, sent(segment, c));
    }
  }
  return builder.plan();
}

Plan broadcast(const Shape& shape) {
  Builder builder(shape);
  if (shape.members == 1 || shape.bytes == 0) return {};
  const auto n = shape.members, relative = (shape.rank + n - shape.root) % n;
  const auto absolute = [&](std::uint32_t rank) { return (rank + shape.root) % n; };
  if (shape.bytes > kTreeBytes) {
    const Cut cut(shape, {shape.bytes});
    for (std::uint32_t c = 0; c < cut.chunks(); ++c) {
      const auto range = cut.chunk(0, c);
      std::optional<Number> arrived;
      if (relative > 0) arrived = builder.receive(absolute(relative - 1), {0, range.offset}, range.length);
      if (relative + 1 < n)
        builder.after(builder.send(absolute(relative + 1), {0, range.offset}, range.length), arrived);
    }
    return builder.plan();
  }
  // A binomial tree: who has it sends it on, to as many ranks as have it already.
  std::uint32_t bit = 1;
  while (bit < n && (relative & bit) == 0) bit *= 2;
  std::optional<Number> arrived;
  if (relative > 0) arrived = builder.receive(absolute(relative - bit), {}, shape.bytes);
  for (bit /= 2; bit > 0; bit /= 2)
    if (relative + bit < n) builder.after(builder.send(absolute(relative + bit), {}, shape.bytes), arrived);
  return builder.plan();
}

Plan all_gather(const Shape& shape, std::span<const std::uint64_t> sizes) {
  Builder builder(shape);
  const Cut cut(shape, {sizes.begin(), sizes.end()});
  const Where where = [](std::uint32_t segment, const Range& chunk) { return Operand{1 + segment, chunk.offset}; };
  Chunks here(cut, shape.members), free(cut, shape.members);
  const auto copied = builder.copy({1 + shape.rank, 0}, {}, sizes[shape.rank]);
  for (std::uint32_t c = 0; c < cut.chunks(); ++c) here(shape.rank, c) = copied;
  ring_all_gather(builder, shape, cut, where, here, free);
  return builder.plan();
}

Plan reduce_scatter(const Shape& shape) {
  const auto n = shape.members;
  Builder builder(shape, n + 1);
  if (n == 1) {
    builder.copy({1, 0}, {}, shape.bytes);
    return builder.plan();
  }
  const Cut cut(shape, std::vector<std::uint64_t>(n, shape.bytes));
  const Where own = [](std::uint32_t segment, const Range& chunk) { return Operand{segment, chunk.offset}; };
  const Where into = [&](std::uint32_t, const Range& chunk) { return Operand{n, chunk.offset}; };
  Chunks sent(cut, n), summed(cut, n);
  ring_reduce_scatter(builder, shape, cut, own, into, false, sent, summed);
  return builder.plan();
}

Plan gather(const Shape& shape) {
  Builder builder(shape);
  if (shape.rank != shape.root) {
    builder.send(shape.root, {}, shape.bytes);
    return builder.plan();
  }
  builder.copy({1 + shape.rank, 0}, {}, shape.bytes);
  for (std::uint32_t rank = 0; rank < shape.members; ++rank)
    if (rank != shape.rank) builder.receive(rank, {1 + rank, 0}, shape.bytes);
  return builder.plan();
}

Plan scatter(const Shape& shape) {
  Builder builder(shape);
  if (shape.rank != shape.root) {
    builder.receive(shape.root, {}, shape.bytes);
    return builder.plan();
  }
  builder.copy({shape.members, 0}, {shape.rank, 0}, shape.bytes);
  for (std::uint32_t rank = 0; rank < shape.members; ++rank)
    if (rank != shape.rank) builder.send(rank, {rank, 0}, shape.bytes);
  return builder.plan();
}

Plan all_to_all(const Shape& shape, std::span<const std::uint64_t> sends, std::span<const std::uint64_t> receives) {
  Builder builder(shape);
  const auto n = shape.members;
  if (sends[shape.rank] > 0) builder.copy({n + shape.rank, 0}, {shape.rank, 0}, sends[shape.rank]);
  // Not all to rank 0 first.
  for (std::uint32_t i = 1; i < n; ++i) {
    const auto to = builder.member(i), from = builder.member(-static_cast<std::int64_t>(i));
    // Also nothing: else one that expects nothing would not hear that there is something.
    builder.send(to, {to, 0}, sends[to]);
    builder.receive(from, {n + from, 0}, receives[from]);
  }
  return builder.plan();
}

Plan barrier(const Shape& shape) {
  Builder builder(shape);
  std::optional<Number> before;
  for (std::uint64_t distance = 1; distance < shape.members; distance *= 2) {
    const auto sent = builder.send(builder.member(static_cast<std::int64_t>(distance)), {}, 0);
    builder.after(sent, before);
    const auto arrived = builder.receive(builder.member(-static_cast<std::int64_t>(distance)), {}, 0);
    builder.after(arrived, before);
    before = arrived;
  }
  return builder.plan();
}

Plan send(const Shape& shape) {
  Builder builder(shape);
  builder.send(shape.root, {}, shape.bytes);
  return builder.plan();
}

Plan receive(const Shape& shape) {
  Builder builder(shape);
  builder.receive(shape.root, {}, shape.bytes);
  return builder.plan();
}

}  // namespace rejoin::collectives
