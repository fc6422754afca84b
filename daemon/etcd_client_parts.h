// The parts of etcd_client.cc that need no gRPC.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "daemon/etcd_client.h"

namespace rejoin::daemon::etcd_client {

Result<> check(const EtcdOptions& options);             // errors: `invalid_argument`
Result<std::string> read_pem(const std::string& path);  // of no path: nothing
// What to do about what etcd won't do at any of its members; null: it is no such error.
const char* remedy_for(const std::string& text);
// Whether etcd says so where the token is not, or no longer, one of this member's.
bool asks_for_token(const std::string& text);

// What gRPC has on a machine of two cores, and it has more on others. Where the system gives it fewer, calls don't come
// back, and those that are cancelled don't either.
constexpr int kThreads = 12;
constexpr const char* kStuck =
    "gRPC, which speaks with etcd, does not even let go of a call that was cancelled: it may lack threads, or memory. "
    "Raise the limit of processes ('ulimit -u', or pids.max of the container) and that of address space ('ulimit -v'), "
    "and start this again";
Result<> has_threads();  // whether the system would give them now; errors: `exhausted`

// Of which cluster each endpoint's answers are. That of the first answer counts; another one's has other data. Where
// all endpoints have come to be of one other, which is what a backup that is put back may make of them, that counts.
class Clusters {
 public:
  explicit Clusters(std::vector<std::string> endpoints) : endpoints_(std::move(endpoints)), of_(endpoints_.size()) {}
  // Why this endpoint's answer does not count; empty: it does. Cluster 0: the answer does not say.
  std::string on_answer(std::size_t endpoint, std::uint64_t cluster);

 private:
  const std::vector<std::string> endpoints_;
  std::vector<std::uint64_t> of_;  // 0: not known
  std::uint64_t cluster_ = 0;      // that counts
  std::string first_;              // the endpoint that said so
};

// The user's password. To refuse one costs etcd 100 ms of a core and more, so one that was refused is shown again after
// ever longer pauses; it is read again then.
class Password {
 public:
  explicit Password(const EtcdOptions& options) : read_(options.read_password), password_(options.password) {}
  // What etcd said of it, while it is not to be shown; null: it may be.
  const Error* refused(TimePoint now) const { return refusal_ && now < again_ ? &*refusal_ : nullptr; }
  const std::string& show();
  void on_taken() { refusal_.reset(), pause_ = {}; }
  // Returns what to say of it.
  Error on_refused(Error refusal, TimePoint now);

 private:
  const std::function<Result<std::string>()> read_;
  std::string password_, unread_;  // why it could not be read again; empty: it could
  std::optional<Error> refusal_;
  Duration pause_{};
  TimePoint again_{};
};
// Whether etcd says so of a user's password.
bool refuses_password(const std::string& text);

}  // namespace rejoin::daemon::etcd_client
