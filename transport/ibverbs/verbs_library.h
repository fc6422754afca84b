// libibverbs, loaded when verbs are first asked for. What its header has inline (posting, polling) goes through the
// device's own table and needs nothing of it.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>

#include "base/result.h"

// Functions of libibverbs that the backend calls, by their names without "ibv_".
// clang-format off
#define REJOIN_VERBS(F) \
  F(get_device_list) F(free_device_list) F(get_device_name) F(get_device_guid) F(open_device) F(close_device) \
  F(query_device) F(port_state_str) F(wc_status_str) F(event_type_str) F(alloc_pd) F(dealloc_pd) \
  F(reg_mr_iova2) F(reg_dmabuf_mr) F(dereg_mr) F(create_comp_channel) F(destroy_comp_channel) F(create_cq) \
  F(resize_cq) F(destroy_cq) F(get_cq_event) F(ack_cq_events) F(create_srq) F(destroy_srq) F(create_qp) \
  F(modify_qp) F(destroy_qp) F(get_async_event) F(ack_async_event) F(fork_init)
// clang-format on

namespace rejoin::transport::ibverbs {

struct Verbs {
#define REJOIN_VERBS_MEMBER(name) decltype(&::ibv_##name) name = nullptr;
  REJOIN_VERBS(REJOIN_VERBS_MEMBER)
#undef REJOIN_VERBS_MEMBER
  // Those behind functions that the header has inline.
  decltype(&::_ibv_query_gid_ex) query_gid_of_size = nullptr;
  decltype(&::ibv_query_port) query_port_of_old = nullptr;

  int query_gid(ibv_context* context, std::uint8_t port, std::uint32_t index, ibv_gid_entry& entry) const {
    return query_gid_of_size(context, port, index, &entry, 0, sizeof entry);
  }
  // By the device's table, or, where its provider has none, by the library.
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr& attributes) const {
    const verbs_context* extended = verbs_get_ctx(context);
    if (extended != nullptr && extended->sz >= sizeof *extended - offsetof(verbs_context, query_port) &&
        extended->query_port != nullptr)
      return extended->query_port(context, port, &attributes, sizeof attributes);
    attributes = {};
    return query_port_of_old(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
  }
  // Access flags that a device may ignore, such as relaxed ordering, are taken.
  ibv_mr* reg_mr(ibv_pd* domain, void* memory, std::size_t size, int access) const {
    return reg_mr_iova2(domain, memory, size, reinterpret_cast<std::uint64_t>(memory),
                        static_cast<unsigned int>(access));
  }
};

// Errors: `unavailable` where it can't be loaded, with what to install.
Result<const Verbs*> load_verbs();
// What has been loaded: whoever has anything of a device has asked for it before.
const Verbs& verbs();

}  // namespace rejoin::transport::ibverbs
