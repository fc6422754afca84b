// Looks names up without holding up who asks. A name server that is silent takes ten seconds and more for each
// question, and all that time the thread that asks it stands. So each question has a thread of its own, a few at a
// time, that is left behind where nobody waits for it any more; and what a name has meant last is used where the answer
// is late, or the name server says that it can't give one.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/result.h"
#include "transport/socket_address.h"

namespace rejoin::transport {

class Names {
 public:
  using Addresses = std::deque<SocketAddress>;
  struct Answer {
    std::uint64_t asker = 0;
    Result<Addresses> addresses;  // one at least
  };

  // The answer is for `asker`. An epoll is told by `tag` that there are answers, from the first question on. Who asks
  // for what others have asked for gets their answer. Errors: of the system.
  Result<> ask(const std::string& name, std::uint64_t asker, const Fd& epoll, std::uint64_t tag, TimePoint now);
  // What has come, and of names that have been known before what has not come within `patience`.
  std::vector<Answer> take(TimePoint now, Duration patience);
  void forget(std::uint64_t asker);              // it waits no more
  bool waits() const { return !open_.empty(); }  // take() is to be called

 private:
  static constexpr std::size_t kAtOnce = 16;   // threads
  static constexpr std::size_t kKnown = 4096;  // names: more than a job has replicas
  struct Arrivals;
  struct Question {
    std::vector<std::pair<std::uint64_t, TimePoint>> askers;  // and since when
  };
  void begin_questions();
  void end(const std::string& name, const Result<Addresses>& found, std::vector<Answer>& answers);

  std::shared_ptr<Arrivals> arrivals_;    // shared with the threads
  std::map<std::string, Question> open_;  // by name, with its port
  std::deque<std::string> queue_;         // of them those that have yet to be asked
  std::size_t under_way_ = 0;             // threads
  std::map<std::string, Addresses> known_;
};

}  // namespace rejoin::transport
