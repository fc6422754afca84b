#include "transport/strangers.h"

#include <sys/resource.h>

#include <atomic>
#include <bit>

#include "base/log.h"

namespace rejoin::transport {

namespace {

std::atomic<std::size_t> of_this_process = 0;

}  // namespace

Strangers::~Strangers() { of_this_process -= greetings_.size(); }

void Strangers::add(EndpointId id, TimePoint now, int descriptor) {
  ++of_this_process;
  greetings_.add(id, now);
  rlimit limit{};
  scarce_ = descriptor >= 0 && ::getrlimit(RLIMIT_NOFILE, &limit) == 0 &&
            static_cast<rlim_t>(descriptor) >= limit.rlim_cur - limit.rlim_cur / 4;
}

void Strangers::remove(EndpointId id) { of_this_process -= greetings_.remove(id); }

bool Strangers::crowd() const { return (scarce_ || of_this_process > kMost) && greetings_.size() > kFew; }

void Strangers::refuse(EndpointId id, ErrorCode code, const std::string& from, const std::string& why) {
  const bool of_a_crowd = crowd();
  remove(id);
  if (code == ErrorCode::unavailable) return;
  turn_away(code == ErrorCode::refused   ? refusals::Why::key
            : code != ErrorCode::timeout ? refusals::Why::protocol
            : of_a_crowd                 ? refusals::Why::too_many
                                         : refusals::Why::no_proof,
            from, why);
}

void Strangers::turn_away(refusals::Why why, const std::string& from, const std::string& what) {
  refusals::count(why);
  if (!std::has_single_bit(++refused_)) return;
  logger().warn("a data connection{}{} was refused: {} ({} so far)", from.empty() ? "" : " from ", from, what,
                refused_);
}

}  // namespace rejoin::transport
