// The plans of all members, played together in an order that a seed gives, end in what the operation is to do.
#include "collectives/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>

#include "base/bytes.h"
#include "base/sanitized.h"

namespace rejoin::collectives {
namespace {

using Memories = std::vector<std::vector<std::uint32_t>>;

constexpr std::uint32_t kPoison = 0xdeadbeef;

// Members whose elements are numbers of 32 bits. A send takes its bytes when it is received, as a write in place would:
// a plan that changes them too early shows.
class Players {
 public:
  Players(std::vector<Plan> plans, std::vector<Memories> memories, std::uint64_t seed)
      : plans_(std::move(plans)), memories_(std::move(memories)), random_(seed) {
    for (std::size_t m = 0; m < plans_.size(); ++m) {
      memories_[m].emplace_back((plans_[m].scratch + 3) / 4, kPoison);
      auto& blockers = blockers_.emplace_back();
      std::map<std::uint32_t, std::uint32_t> count[2];
      for (std::uint32_t t = 0; t < plans_[m].tasks.size(); ++t) {
        const auto& task = plans_[m].tasks[t];
        blockers.push_back(task.blockers);
        if (task.kind == Task::Kind::send) sends_[{m, task.peer, count[0][task.peer]++}] = t;
        if (task.kind == Task::Kind::receive) receives_[{m, t}] = {task.peer, count[1][task.peer]++};
        if (task.blockers == 0) free_.emplace_back(m, t);
        ++left_;
      }
    }
  }

  // Plays all tasks; false where some never can.
  bool play() {
    while (!free_.empty()) {
      // One that is free, at random; a send is done by its receive.
      const auto at = random_() % free_.size();
      const auto [m, t] = free_[at];
      const auto& task = plans_[m].tasks[t];
      if (task.kind == Task::Kind::send || (task.kind == Task::Kind::receive && !sender_of(m, t))) {
        if (std::none_of(free_.begin(), free_.end(), [&](const auto& f) {
              const auto kind = plans_[f.first].tasks[f.second].kind;
              return kind == Task::Kind::copy || kind == Task::Kind::combine ||
                     (kind == Task::Kind::receive && sender_of(f.first, f.second));
            }))
          break;
        continue;
      }
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(at));
      if (task.kind == Task::Kind::receive) {
        const auto sender = *sender_of(m, t);
        const auto& sent = plans_[sender.first].tasks[sender.second];
        EXPECT_EQ(sent.length, task.length);
        for (std::uint64_t i = 0; i < task.length / 4; ++i) at_(m, task.at, i) = at_(sender.first, sent.at, i);
        std::erase(free_, sender);
        done(sender.first, sender.second);
      } else {
        for (std::uint64_t i = 0; i < task.length / 4; ++i)
          at_(m, task.at, i) =
              task.kind == Task::Kind::copy ? at_(m, task.first, i) : at_(m, task.first, i) + at_(m, task.second, i);
        if (task.kind == Task::Kind::combine && task.last) last_combined_ += task.length / 4;
      }
      done(m, t);
    }
    return left_ == 0;
  }
  const Memories& of(std::size_t member) const { return memories_[member]; }
  std::uint64_t last_combined() const { return last_combined_; }  // elements

 private:
  using Which = std::pair<std::size_t, std::uint32_t>;
  std::uint32_t& at_(std::size_t m, const Operand& operand, std::uint64_t i) {
    return memories_[m].at(operand.memory).at(operand.offset / 4 + i);
  }
  // The send that this receive gets, if it is free.
  std::optional<Which> sender_of(std::size_t m, std::uint32_t t) const {
    const auto [peer, index] = receives_.at({m, t});
    const auto found = sends_.find({peer, m, index});
    if (found == sends_.end()) return std::nullopt;
    const Which sender{peer, found->second};
    return std::find(free_.begin(), free_.end(), sender) != free_.end() ? std::optional(sender) : std::nullopt;
  }
  void done(std::size_t m, std::uint32_t t) {
    --left_;
    for (const auto next : plans_[m].tasks[t].unblocks)
      if (--blockers_[m][next] == 0) free_.emplace_back(m, next);
  }

  std::vector<Plan> plans_;
  std::vector<Memories> memories_;
  std::mt19937_64 random_;
  std::vector<std::vector<std::uint32_t>> blockers_;
  std::vector<Which> free_;
  std::map<std::array<std::size_t, 3>, std::uint32_t> sends_;
  std::map<Which, std::pair<std::uint32_t, std::uint32_t>> receives_;
  std::size_t left_ = 0;
  std::uint64_t last_combined_ = 0;
};

std::uint32_t element(std::size_t member, std::size_t memory, std::size_t i) {
  return static_cast<std::uint32_t>(member * 1'000'003 + memory * 10'007 + i * 31 + 1);
}
std::vector<std::uint32_t> filled(std::size_t member, std::size_t memory, std::size_t count) {
  std::vector<std::uint32_t> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = element(member, memory, i);
  return all;
}

constexpr std::uint32_t kMost = kSanitized ? 4 : 9;                       // members
constexpr std::size_t kCounts[] = {0, 1, 7, 100, 9'000, 20'011, 70'001};  // elements: on both sides of every limit

void for_each_shape(const std::function<void(Shape)>& call, std::uint32_t most = kMost) {
  for (std::uint32_t n = 1; n <= most; ++n)
    for (const auto count : kCounts) {
      SCOPED_TRACE(testing::Message() << n << " members, " << count << " elements");
      call({.members = n, .bytes = count * 4, .element = 4, .chunk = 8 * KiB});
      if (testing::Test::HasFailure()) return;
    }
}

std::vector<std::uint32_t> sums(std::uint32_t members, std::size_t memory, std::size_t count) {
  std::vector<std::uint32_t> all(count);
  for (std::uint32_t m = 0; m < members; ++m)
    for (std::size_t i = 0; i < count; ++i) all[i] += element(m, memory, i);
  return all;
}

Players players(Shape shape, const std::function<Plan(const Shape&)>& plan,
                const std::function<Memories(std::uint32_t)>& memories) {
  std::vector<Plan> plans;
  std::vector<Memories> all;
  for (shape.rank = 0; shape.rank < shape.members; ++shape.rank) {
    plans.push_back(plan(shape));
    all.push_back(memories(shape.rank));
  }
  return Players(std::move(plans), std::move(all), shape.members * 1000 + shape.bytes);
}

TEST(Plan, AnAllReduceLeavesTheSumWithAll) {
  for_each_shape([](const Shape& shape) {
    const auto count = shape.bytes / 4;
    auto all = players(shape, all_reduce, [&](auto m) { return Memories{filled(m, 0, count)}; });
    ASSERT_TRUE(all.play());
    for (std::uint32_t m = 0; m < shape.members; ++m) ASSERT_EQ(all.of(m)[0], sums(shape.members, 0, count));
    // A mean is divided once: by everyone where everyone adds all, else where a segment is complete.
    if (shape.members > 1 && count > 0)
      EXPECT_TRUE(all.last_combined() == count || all.last_combined() == count * shape.members);
  });
}

TEST(Plan, AReduceLeavesTheSumWithTheRootAndTheInputsWithTheOthers) {
  for_each_shape([](Shape shape) {
    const auto count = shape.bytes / 4;
    shape.root = shape.members / 2;
    auto all = players(shape, reduce, [&](auto m) { return Memories{filled(m, 0, count)}; });
    ASSERT_TRUE(all.play());
    for (std::uint32_t m = 0; m < shape.members; ++m)
      ASSERT_EQ(all.of(m)[0], m == shape.root ? sums(shape.members, 0, count) : filled(m, 0, count));
  });
}

TEST(Plan, ABroadcastReachesAll) {
  for_each_shape(
      [](Shape shape) {
        const auto count = shape.bytes / 4;
        for (shape.root = 0; shape.root < shape.members; ++shape.root) {
          auto all = players(shape, broadcast, [&](auto m) { return Memories{filled(m, 0, count)}; });
          ASSERT_TRUE(all.play());
          for (std::uint32_t m = 0; m < shape.members; ++m) ASSERT_EQ(all.of(m)[0], filled(shape.root, 0, count));
        }
      },
      2 * kMost);
}

TEST(Plan, AnAllGatherBringsAllToAllAlsoOfDifferentSizes) {
  for (const bool uneven : {false, true})
    for_each_shape([&](const Shape& shape) {
      std::vector<std::uint64_t> sizes;
      for (std::uint32_t m = 0; m < shape.members; ++m) sizes.push_back(uneven && m % 2 == 1 ? 12 * m : shape.bytes);
      auto all = players(
          shape, [&](const Shape& s) { return all_gather(s, sizes); },
          [&](auto m) {
            Memories memories{filled(m, 0, sizes[m] / 4)};
            for (const auto size : sizes) memories.emplace_back(size / 4, kPoison);
            return memories;
          });
      ASSERT_TRUE(all.play());
      for (std::uint32_t m = 0; m < shape.members; ++m)
        for (std::uint32_t other = 0; other < shape.members; ++other)
          ASSERT_EQ(all.of(m)[1 + other], filled(other, 0, sizes[other] / 4));
    });
}

TEST(Plan, AReduceScatterLeavesEachItsSumAndAllInputs) {
  for_each_shape([](const Shape& shape) {
    const auto count = shape.bytes / 4, n = std::size_t{shape.members};
    auto all = players(shape, reduce_scatter, [&](auto m) {
      Memories memories;
      for (std::size_t i = 0; i < n; ++i) memories.push_back(filled(m, i, count));
      memories.emplace_back(count, kPoison);
      return memories;
    });
    ASSERT_TRUE(all.play());
    for (std::uint32_t m = 0; m < n; ++m) {
      ASSERT_EQ(all.of(m)[n], sums(shape.members, m, count));
      for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(all.of(m)[i], filled(m, i, count));
    }
  });
}

TEST(Plan, GatherScatterAndAllToAllMoveWhatTheySay) {
  for_each_shape([](Shape shape) {
    const auto count = shape.bytes / 4, n = std::size_t{shape.members};
    shape.root = shape.members - 1;
    auto gathered = players(shape, gather, [&](auto m) {
      Memories memories{filled(m, 0, count)};
      if (m == shape.root) memories.resize(1 + n, std::vector<std::uint32_t>(count));
      return memories;
    });
    ASSERT_TRUE(gathered.play());
    for (std::uint32_t m = 0; m < n; ++m) ASSERT_EQ(gathered.of(shape.root)[1 + m], filled(m, 0, count));

    auto scattered = players(shape, scatter, [&](auto m) {
      Memories memories;
      for (std::size_t i = 0; m == shape.root && i < n; ++i) memories.push_back(filled(m, i, count));
      memories.emplace_back(count);
      return memories;
    });
    ASSERT_TRUE(scattered.play());
    for (std::uint32_t m = 0; m < n; ++m)
      ASSERT_EQ(scattered.of(m)[m == shape.root ? n : 0], filled(shape.root, m, count));

    const auto size = [&](std::size_t from, std::size_t to) {
      return (from + 2 * to) % 3 == 0 ? 0 : shape.bytes + 4 * to;
    };
    auto exchanged = players(
        shape,
        [&](const Shape& s) {
          std::vector<std::uint64_t> out, in;
          for (std::size_t i = 0; i < n; ++i) out.push_back(size(s.rank, i)), in.push_back(size(i, s.rank));
          return all_to_all(s, out, in);
        },
        [&](auto m) {
          Memories memories;
          for (std::size_t i = 0; i < n; ++i) memories.push_back(filled(m, i, size(m, i) / 4));
          for (std::size_t i = 0; i < n; ++i) memories.emplace_back(size(i, m) / 4, kPoison);
          return memories;
        });
    ASSERT_TRUE(exchanged.play());
    for (std::uint32_t m = 0; m < n; ++m)
      for (std::uint32_t from = 0; from < n; ++from)
        ASSERT_EQ(exchanged.of(m)[n + from], filled(from, m, size(from, m) / 4));
  });
}

TEST(Plan, NobodyLeavesABarrierBeforeTheLastHasCome) {
  for (std::uint32_t n = 1; n <= 17; ++n)
    for (std::uint32_t late = 0; late < n; ++late) {
      std::vector<Plan> plans;
      Shape shape{.members = n};
      for (shape.rank = 0; shape.rank < n; ++shape.rank) plans.push_back(barrier(shape));
      // With one that never comes nobody else gets through: each waits, over some others, for it.
      std::vector<std::vector<bool>> done(n);
      for (std::uint32_t m = 0; m < n; ++m) done[m].resize(plans[m].tasks.size());
      const auto tasks_blocked = [&](std::uint32_t m, std::uint32_t t) {
        for (std::uint32_t before = 0; before < t; ++before)
          for (const auto next : plans[m].tasks[before].unblocks)
            if (next == t && !done[m][before]) return true;
        return false;
      };
      for (bool progress = true; progress;) {
        progress = false;
        for (std::uint32_t m = 0; m < n; ++m)
          for (std::uint32_t t = 0; m != late && t < plans[m].tasks.size(); ++t) {
            if (done[m][t] || tasks_blocked(m, t)) continue;
            const auto& task = plans[m].tasks[t];
            bool can = task.kind == Task::Kind::send;
            // One of each distance: the sender's with this one as its peer.
            for (std::uint32_t s = 0; !can && task.peer != late && s < plans[task.peer].tasks.size(); ++s)
              can = plans[task.peer].tasks[s].kind == Task::Kind::send && plans[task.peer].tasks[s].peer == m &&
                    done[task.peer][s] && s == t - 1;
            if (can) done[m][t] = progress = true;
          }
      }
      for (std::uint32_t m = 0; m < n; ++m)
        if (n > 1)
          EXPECT_FALSE(std::all_of(done[m].begin(), done[m].end(), [](bool d) { return d; })) << m << " " << late;
    }
}

}  // namespace
}  // namespace rejoin::collectives
