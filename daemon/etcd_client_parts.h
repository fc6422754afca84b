// The parts of etcd_client.cc that need no gRPC.
#pragma once

#include <optional>
#include <string>

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
Result<> has_threads();  // whether the system would give them now; errors: `exhausted`

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
