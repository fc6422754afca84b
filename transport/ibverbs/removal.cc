#include "transport/ibverbs/removal.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <rdma/rdma_user_cm.h>
#include <unistd.h>

#include <cstring>

namespace rejoin::transport::ibverbs {

namespace {

constexpr std::uint32_t kDeviceRemoval = 11;  // RDMA_CM_EVENT_DEVICE_REMOVAL

template <typename Command>
bool ask(const Fd& manager, std::uint32_t number, Command command, std::size_t answer_bytes) {
  struct {
    rdma_ucm_cmd_hdr header;
    Command command;
  } request{{.cmd = number, .in = sizeof(Command), .out = static_cast<std::uint16_t>(answer_bytes)}, command};
  return ::write(manager.get(), &request, sizeof request) == static_cast<ssize_t>(sizeof request);
}

}  // namespace

std::optional<RemovalWatch> RemovalWatch::start(const std::string& address) {
  sockaddr_in where{};
  where.sin_family = AF_INET;
  if (::inet_pton(AF_INET, address.c_str(), &where.sin_addr) != 1) return std::nullopt;
  RemovalWatch watch(Fd(::open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC | O_NONBLOCK)));
  if (!watch.manager_) return std::nullopt;
  rdma_ucm_create_id_resp id{};
  const rdma_ucm_create_id create{
      .uid = 1, .response = reinterpret_cast<std::uintptr_t>(&id), .ps = RDMA_PS_TCP, .qp_type = 2};  // IB_QPT_RC
  if (!ask(watch.manager_, RDMA_USER_CM_CMD_CREATE_ID, create, sizeof id)) return std::nullopt;
  // Bound to the address, it belongs to the device.
  rdma_ucm_bind bind{.id = id.id, .addr_size = sizeof where};
  std::memcpy(&bind.addr, &where, sizeof where);
  if (!ask(watch.manager_, RDMA_USER_CM_CMD_BIND, bind, 0)) return std::nullopt;
  return watch;
}

bool RemovalWatch::removed() {
  bool gone = false;
  for (rdma_ucm_event_resp event{};;) {
    const rdma_ucm_get_event get{.response = reinterpret_cast<std::uintptr_t>(&event)};
    if (!ask(manager_, RDMA_USER_CM_CMD_GET_EVENT, get, sizeof event)) return gone;
    gone = gone || event.event == kDeviceRemoval;
  }
}

}  // namespace rejoin::transport::ibverbs
