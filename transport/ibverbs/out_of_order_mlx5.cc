#include "transport/ibverbs/mlx5_library.h"
#include "transport/ibverbs/out_of_order.h"

namespace rejoin::transport::ibverbs {

std::string why_not_out_of_order(ibv_context* context) {
  const auto loaded = load_mlx5();
  if (!loaded) return loaded.error().message;
  const Mlx5& mlx5 = **loaded;
  if (!mlx5.is_supported(context->device)) return "it is no mlx5 device";
  mlx5dv_context attributes{};
  attributes.comp_mask = MLX5DV_CONTEXT_MASK_OOO_RECV_WRS;
  const bool known =
      mlx5.query_device(context, &attributes) == 0 && (attributes.comp_mask & MLX5DV_CONTEXT_MASK_OOO_RECV_WRS) != 0;
  if (!known || attributes.ooo_recv_wrs_caps.max_rc == 0)
    return "the device or its driver has no out-of-order data placement for reliable-connected queue pairs";
  return {};
}

ibv_qp* create_out_of_order(ibv_pd* domain, const ibv_qp_init_attr& attributes) {
  ibv_qp_init_attr_ex extended{};
  extended.send_cq = attributes.send_cq;
  extended.recv_cq = attributes.recv_cq;
  extended.qp_type = IBV_QPT_RC;
  extended.cap = attributes.cap;
  extended.cap.max_recv_wr = extended.cap.max_recv_sge = 1;
  extended.comp_mask = IBV_QP_INIT_ATTR_PD;
  extended.pd = domain;
  mlx5dv_qp_init_attr placement{};
  placement.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS;
  placement.create_flags = MLX5DV_QP_CREATE_OOO_DP;
  return mlx5().create_qp(domain->context, &extended, &placement);
}

}  // namespace rejoin::transport::ibverbs
