// Queue pairs of a device that places what arrives as it comes, in any order (mlx5: OOO_DP, with adaptive routing): no
// message of one waits for another that took a slower path, and none is sent again for having been overtaken. Built
// with an rdma-core that knows of it (out_of_order_mlx5.cc), or not (out_of_order_none.cc).
#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace rejoin::transport::ibverbs {

// Empty where the device does it; otherwise why not, as the end of a sentence.
std::string why_not_out_of_order(ibv_context* context);

// A reliable-connected queue pair of that kind; the peer's must be of it too. It is for writes and reads: it receives
// nothing. Null and errno on failure.
ibv_qp* create_out_of_order(ibv_pd* domain, const ibv_qp_init_attr& attributes);

}  // namespace rejoin::transport::ibverbs
