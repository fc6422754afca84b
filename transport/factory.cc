#include "transport/factory.h"

#include "transport/shm/factory.h"
#include "transport/striped/factory.h"
#include "transport/tcp/factory.h"
#include "transport/ucx/factory.h"

namespace rejoin::transport {

namespace {

Result<std::unique_ptr<Engine>> tcp_over_rails(std::string_view list) {
  static const SteadyClock clock;
  std::vector<std::unique_ptr<Engine>> rails;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    auto rail = tcp::make_engine({.local = std::string(list.substr(begin, end - begin))});
    if (!rail) return rail;
    rails.push_back(std::move(*rail));
    begin = end + 1;
  }
  return striped::make_engine(std::move(rails), {}, clock);
}

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(const std::string& name) {
  if (name == "tcp") return tcp::make_engine({});
  if (name.starts_with("tcp:")) return tcp_over_rails(std::string_view(name).substr(4));
  if (name == "shm") return shm::make_engine();
  if (name.starts_with("ucx:")) return ucx::make_engine({.transports = name.substr(4)});
  return fail(ErrorCode::invalid_argument, "no transport '{}': use shm, tcp, tcp:ADDRESS,ADDRESS… or ucx:LIST", name);
}

}  // namespace rejoin::transport
