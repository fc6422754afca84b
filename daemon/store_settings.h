// Where a coordinator's decisions are: in a file of its own, or in a store that several coordinators share.
#pragma once

#include <string>
#include <vector>

#include "base/result.h"

namespace rejoin {
class CommandLine;
}

namespace rejoin::daemon {

struct StoreSettings {
  std::string store = "file";  // or etcd:HOST:PORT,HOST:PORT…
  std::string job;             // its name in the store
  std::string ca, cert, key;   // files, for TLS with etcd
  std::string user, password_file;
  bool shared() const { return store != "file"; }
  std::vector<std::string> endpoints() const;  // of a shared one
  std::string prefix() const { return "/rejoin/" + job + "/"; }
};
void bind(CommandLine& line, StoreSettings& s);

// Whether they go together. Errors name the settings and what to do.
Result<> check(const StoreSettings& s);

}  // namespace rejoin::daemon
