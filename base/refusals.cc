#include "base/refusals.h"

#include <algorithm>
#include <atomic>

namespace rejoin::refusals {

namespace {
std::array<std::atomic<std::uint64_t>, kWhys> all{};
}

const char* name_of(Why why) {
  switch (why) {
    case Why::key: return "key";
    case Why::certificate: return "certificate";
    case Why::no_proof: return "no_proof";
    case Why::too_many: return "too_many";
    case Why::protocol: return "protocol";
    case Why::version: return "version";
    case Why::user: return "user";
    case Why::job: return "job";
    case Why::declaration: return "declaration";
    case Why::place: return "place";
    case Why::absent: return "absent";
    case Why::offer: return "offer";
    case Why::memory_key: return "memory_key";
    case Why::memory_access: return "memory_access";
  }
  return "unknown";
}

void count(Why why) { all[static_cast<std::size_t>(why)].fetch_add(1, std::memory_order_relaxed); }

std::array<std::uint64_t, kWhys> counted() {
  std::array<std::uint64_t, kWhys> now{};
  std::transform(all.begin(), all.end(), now.begin(),
                 [](const auto& one) { return one.load(std::memory_order_relaxed); });
  return now;
}

}  // namespace rejoin::refusals
