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
const Result<Mlx5>& mlx5();

}  // namespace rejoin::transport::ibverbs
