// A device's port, opened: context, protection domain, GID, memory registration. And owners of what libibverbs gives
// out.
#pragma once

#include <memory>

#include "transport/ibverbs/factory.h"
#include "transport/ibverbs/verbs_library.h"

namespace rejoin::transport::ibverbs {

template <auto destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* handle) const {
    (void)(verbs().*destroy)(handle);
  }
};
using Context = std::unique_ptr<ibv_context, Destroyer<&Verbs::close_device>>;
using ProtectionDomain = std::unique_ptr<ibv_pd, Destroyer<&Verbs::dealloc_pd>>;
using CompletionChannel = std::unique_ptr<ibv_comp_channel, Destroyer<&Verbs::destroy_comp_channel>>;
using CompletionQueue = std::unique_ptr<ibv_cq, Destroyer<&Verbs::destroy_cq>>;
using SharedReceiveQueue = std::unique_ptr<ibv_srq, Destroyer<&Verbs::destroy_srq>>;
using QueuePairHandle = std::unique_ptr<ibv_qp, Destroyer<&Verbs::destroy_qp>>;
using MemoryRegion = std::unique_ptr<ibv_mr, Destroyer<&Verbs::dereg_mr>>;

class Device {
 public:
  // Also where its port is down: see refresh(). Errors: `not_found` (no such device, port or GID index), `unavailable`.
  static Result<Device> open(const Options& options);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  const ibv_port_attr& port() const { return port_; }
  std::uint8_t port_number() const { return port_number_; }
  const ibv_gid& gid() const { return gid_.gid; }
  std::uint8_t gid_index() const { return static_cast<std::uint8_t>(gid_.gid_index); }
  bool ethernet() const { return port_.link_layer == IBV_LINK_LAYER_ETHERNET; }
  const std::string& name() const { return name_; }
  // Looks the port and its GID up afresh: RoCE moves a GID to another index when its interface goes down and comes
  // back. Errors: `unavailable` where the port is down or has lost its GID.
  Result<> refresh();
  bool link_local() const;  // the GID has no meaning beyond the port's own link
  // The IPv4 address that the GID stands for; empty where it stands for none.
  std::string address() const;
  // Errors say what to do: memory lock limit, no such mapping. CUDA memory goes through the kernel's peer memory module
  // (nvidia-peermem), or by its dma-buf.
  Result<MemoryRegion> register_memory(std::span<std::byte> memory, MemoryKind kind, Access access) const;
  Result<MemoryRegion> register_dma_buf(const DmaBuf& buffer, Access access) const;

 private:
  Result<> find_gid();
  Context context_;
  ProtectionDomain domain_;
  ibv_device_attr limits_{};
  ibv_port_attr port_{};
  ibv_gid_entry gid_{};
  bool had_gid_ = false;
  std::uint8_t port_number_ = 1;
  std::optional<std::uint32_t> wanted_gid_;
  std::string name_;
};

}  // namespace rejoin::transport::ibverbs
