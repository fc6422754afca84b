// A job that never was, and loses a replica.
#pragma once

#include "daemon/explain.h"
#include "daemon/tests/made_up_recording.h"

namespace rejoin::daemon {

// Three replicas; r1.0 ends at 1,000 ms in step 11, comes back, catches up and contributes from step 16 on.
struct LostReplica {
  MadeUp coordinator{"coordinator", 1, 1}, node{"node1", 1, 2}, r0{"r0.0", 1, 10}, r1{"r1.0", 1, 11},
      r1_again{"r1.0", 1, 12};
  std::vector<MadeUp*> all{&coordinator, &node, &r0, &r1, &r1_again};

  LostReplica() {
    coordinator.add(1 * ms, events::Kind::epoch, {.epoch = 1, .step = 1}, "0,1,2\nstart");
    node.add(1 * ms, events::Kind::rank_up, {.replica = 1, .number = 0, .a = 11});
    r1.add(1 * ms, events::Kind::registered, {.a = 2});
    for (std::uint64_t step = 1; step <= 20; ++step)  // 100 ms each, and the eleventh 50 ms more
      coordinator.add(static_cast<std::int64_t>(step) * 100 * ms + (step > 10 ? 50 * ms : 0), events::Kind::commit,
                      {.epoch = 1, .step = step});
    r1.add(1000 * ms, events::Kind::bucket_begun, {.epoch = 1, .step = 11});
    node.add(1002 * ms, events::Kind::rank_down, {.replica = 1, .number = 0, .a = 11}, "its process 11 ended");
    r0.add(1003 * ms, events::Kind::peer_lost, {.replica = 1}, "connection reset");
    coordinator.add(1006 * ms, events::Kind::appended, {.number = 1, .a = 700'000});
    coordinator.add(1006 * ms, events::Kind::epoch, {.epoch = 2, .step = 11},
                    "0,2\nwithout replica 1: its process 11 ended");
    r0.add(1008 * ms, events::Kind::enter_epoch, {.epoch = 2, .step = 11, .number = 1, .a = 3, .b = 3 << 20}, "0,2");
    r0.add(1012 * ms, events::Kind::entered, {.epoch = 2});
  }
  void comes_back() {
    r1_again.add(1200 * ms, events::Kind::opened);
    node.add(1210 * ms, events::Kind::rank_up, {.replica = 1, .number = 0, .a = 12});
    coordinator.add(1250 * ms, events::Kind::epoch, {.epoch = 3, .step = 13}, "0,2,1c\nreplica 1 comes in");
    node.add(1260 * ms, events::Kind::source_up, {.replica = 0});
    node.add(1260 * ms, events::Kind::source_up, {.replica = 2});
    node.add(1450 * ms, events::Kind::caught_up, {.replica = 1, .number = 0, .a = 8 << 20, .b = 200'000'000},
             "8 slices from 2 sources, 1 fetched again");
    coordinator.add(1550 * ms, events::Kind::epoch, {.epoch = 4, .step = 16}, "0,2,1\nreplica 1 has caught up");
  }
  void ends() {
    for (auto* one : all)
      if (one != &r1) one->add(3000 * ms, events::Kind::ended, {}, "in order");
  }
  std::vector<Recording> recordings() const {
    std::vector<Recording> made;
    for (const auto* one : all)
      if (!one->made.events.empty()) made.push_back(one->recording());
    return made;
  }
};

inline std::vector<std::string> told(std::vector<Recording> all, std::size_t which = 0) {
  const auto joined = join(std::move(all));
  const auto incidents = find_incidents(joined);
  if (incidents.all.size() <= which) return {};
  return explain(joined, incidents, incidents.all[which]);
}

}  // namespace rejoin::daemon
