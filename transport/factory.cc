#include "transport/factory.h"

#include "transport/shm/factory.h"
#include "transport/tcp/factory.h"
#include "transport/ucx/factory.h"

namespace rejoin::transport {

Result<std::unique_ptr<Engine>> make_engine(const std::string& name) {
  if (name == "tcp") return tcp::make_engine({});
  if (name == "shm") return shm::make_engine();
  if (name.starts_with("ucx:")) return ucx::make_engine({.transports = name.substr(4)});
  return fail(ErrorCode::invalid_argument, "no transport '{}': use shm, tcp or ucx:LIST", name);
}

}  // namespace rejoin::transport
