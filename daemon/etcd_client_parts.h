// The parts of etcd_client.cc that need no gRPC.
#pragma once

#include <string>

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

}  // namespace rejoin::daemon::etcd_client
