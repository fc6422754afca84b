#include <cerrno>

#include "transport/ibverbs/out_of_order.h"

namespace rejoin::transport::ibverbs {

std::string why_not_out_of_order(ibv_context*) {
  return "this build's rdma-core has no mlx5dv with out-of-order data placement (it came with version 56)";
}

ibv_qp* create_out_of_order(ibv_pd*, const ibv_qp_init_attr&) {
  errno = ENOTSUP;
  return nullptr;
}

}  // namespace rejoin::transport::ibverbs
