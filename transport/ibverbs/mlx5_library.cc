#include "transport/ibverbs/mlx5_library.h"

#include "base/shared_library.h"

namespace rejoin::transport::ibverbs {

namespace {

Result<Mlx5> find_mlx5() {
  auto library = SharedLibrary::load("libmlx5.so.1", "Debian: ibverbs-providers; others: rdma-core");
  if (!library) return tl::unexpected(library.error());
  Mlx5 mlx5;
  library->find(mlx5.is_supported, "mlx5dv_is_supported");
  library->find(mlx5.query_device, "mlx5dv_query_device");
  library->find(mlx5.create_qp, "mlx5dv_create_qp");
  if (auto complete = library->complete(); !complete) return tl::unexpected(complete.error());
  return mlx5;
}

}  // namespace

Result<const Mlx5*> load_mlx5() { return load_once<Mlx5, find_mlx5>(); }
const Mlx5& mlx5() { return has_loaded<Mlx5, find_mlx5>(); }

}  // namespace rejoin::transport::ibverbs
