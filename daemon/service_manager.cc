#include "daemon/service_manager.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::daemon {

Result<ServiceManager> ServiceManager::from_environment() {
  const char* given = ::getenv("NOTIFY_SOCKET");
  if (given == nullptr || *given == '\0') return ServiceManager();
  return at(given);
}

Result<ServiceManager> ServiceManager::at(const std::string& address) {
  ServiceManager manager;
  if ((address[0] != '/' && address[0] != '@') || address.size() >= sizeof manager.address_.sun_path)
    return fail(
        ErrorCode::invalid_argument,
        "NOTIFY_SOCKET '{}' is neither a path nor an @name of up to {} letters: the service manager would never "
        "hear that this process is ready; unset it",
        address, sizeof manager.address_.sun_path - 1);
  manager.address_.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), manager.address_.sun_path);
  if (address[0] == '@') manager.address_.sun_path[0] = '\0';
  manager.length_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size());
  manager.socket_ = Fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!manager.socket_) return fail_errno("a socket for the service manager");
  return manager;
}

bool ServiceManager::send(const std::string& text) {
  if (!socket_) return false;
  const auto* to = reinterpret_cast<const sockaddr*>(&address_);
  if (::sendto(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL, to, length_) >= 0) return true;
  if (errno == EAGAIN || errno == ENOBUFS || errno == EINTR) return false;
  spdlog::warn("the service manager at NOTIFY_SOCKET hears nothing any more: {}", std::strerror(errno));
  socket_ = Fd();
  return false;
}

void ServiceManager::ready(const std::string& line) {
  if (line == heard_) return;
  if (send((heard_.empty() ? "READY=1\nSTATUS=" : "STATUS=") + line)) heard_ = line;
}

void ServiceManager::stopping() { send("STOPPING=1\nSTATUS=ending"); }

namespace {

std::string upstream(const nlohmann::json& coordinator) {
  const auto address = coordinator.at("address").get<std::string>();
  if (coordinator.at("connected").get<bool>()) return "connected with " + address;
  const auto why = coordinator.at("reason").get<std::string>();
  return "not connected with " + address + (why.empty() ? "" : ": " + why);
}

}  // namespace

std::string line_of(const nlohmann::json& status) {
  std::vector<std::string> parts;
  if (const auto found = status.find("coordinator_role"); found != status.end()) {
    const auto& c = *found;
    parts.push_back(fmt::format("coordinator{}: step {} committed in epoch {} by {} replicas{}",
                                c.at("store").at("leads").get<bool>() ? "" : " (standby)",
                                c.at("committed").get<std::uint64_t>(), c.at("epoch").get<std::uint64_t>(),
                                c.at("members").size(), c.at("finished").get<bool>() ? ", finished" : ""));
  }
  if (const auto found = status.find("relay_role"); found != status.end())
    parts.push_back(fmt::format("relay of {} nodes, {}", found->at("nodes").get<std::uint64_t>(),
                                upstream(found->at("coordinator"))));
  if (const auto found = status.find("node_role"); found != status.end())
    parts.push_back(
        fmt::format("node of {} trainers, {}", found->at("ranks").size(), upstream(found->at("coordinator"))));
  // Of a message a line ends with its first newline.
  std::string line = fmt::format("{}", fmt::join(parts, "; "));
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

}  // namespace rejoin::daemon
