// libmlx5, loaded when a rail asks for out-of-order data placement.
#pragma once

#include <infiniband/mlx5dv.h>

#include "base/result.h"

namespace rejoin::transport::ibverbs {

struct Mlx5 {
  decltype(&::mlx5dv_is_supported) is_supported = nullptr;
  decltype(&::mlx5dv_query_device) query_device = nullptr;
  decltype(&::mlx5dv_create_qp) create_qp = nullptr;
};

// Errors: `unavailable` where it can't be loaded, with what to install.
Result<const Mlx5*> load_mlx5();
// What has been loaded: whoever has a device that places out of order has asked for it before.
const Mlx5& mlx5();

}  // namespace rejoin::transport::ibverbs
