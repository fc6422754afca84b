// As much of mlx5dv as transport/ibverbs/out_of_order_mlx5.cc uses, for the software devices of fake_verbs.cc: here the
// real code is compiled and run even where the installed rdma-core is older than it needs.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#define MLX5DV_CONTEXT_MASK_OOO_RECV_WRS (std::uint64_t{1} << 16)
#define MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS 1
#define MLX5DV_QP_CREATE_OOO_DP (1 << 7)

extern "C" {
struct mlx5dv_context {
  std::uint64_t comp_mask;
  struct {
    std::uint32_t max_rc;
  } ooo_recv_wrs_caps;
};
struct mlx5dv_qp_init_attr {
  std::uint64_t comp_mask;
  std::uint32_t create_flags;
};
bool mlx5dv_is_supported(ibv_device* device);
int mlx5dv_query_device(ibv_context* context, mlx5dv_context* attributes);
ibv_qp* mlx5dv_create_qp(ibv_context* context, ibv_qp_init_attr_ex* attributes, mlx5dv_qp_init_attr* more);
}
