// librdmacm, loaded when a rail asks for it (cm=).
#pragma once

#include <rdma/rdma_cma.h>

#include "base/result.h"

// Functions that the backend calls, by their names without "rdma_".
// clang-format off
#define REJOIN_RDMACM(F) \
  F(create_event_channel) F(destroy_event_channel) F(create_id) F(destroy_id) F(bind_addr) F(listen) \
  F(get_src_port) F(set_option) F(resolve_addr) F(resolve_route) F(init_qp_attr) F(connect) F(accept) F(reject) \
  F(establish) F(get_cm_event) F(ack_cm_event) F(event_str)
// clang-format on

namespace rejoin::transport::ibverbs {

struct RdmaCm {
#define REJOIN_RDMACM_MEMBER(name) decltype(&::rdma_##name) name = nullptr;
  REJOIN_RDMACM(REJOIN_RDMACM_MEMBER)
#undef REJOIN_RDMACM_MEMBER
};

// Errors: `unavailable` where it can't be loaded, with what to install.
Result<const RdmaCm*> load_rdmacm();
const RdmaCm& rdmacm();  // that has been loaded

}  // namespace rejoin::transport::ibverbs
