#include "transport/ibverbs/verbs_library.h"

#include "base/shared_library.h"

namespace rejoin::transport::ibverbs {

namespace {

Result<Verbs> find_verbs() {
  auto library = SharedLibrary::load("libibverbs.so.1", "Debian: libibverbs1 and ibverbs-providers; others: rdma-core");
  if (!library) return tl::unexpected(library.error());
  Verbs verbs;
#define REJOIN_FIND(name) library->find(verbs.name, "ibv_" #name);
  REJOIN_VERBS(REJOIN_FIND)
#undef REJOIN_FIND
  library->find(verbs.query_gid_of_size, "_ibv_query_gid_ex");
  library->find(verbs.query_port_of_old, "ibv_query_port");
  if (auto complete = library->complete(); !complete) return tl::unexpected(complete.error());
  // Before anything is registered. On kernels before 5.12 a trainer that forks would else go on writing into copies of
  // pages that the device reads. It fails where somebody has registered memory already; then it is as it is.
  (void)verbs.fork_init();
  return verbs;
}

}  // namespace

Result<const Verbs*> load_verbs() { return load_once<Verbs, find_verbs>(); }
const Verbs& verbs() { return has_loaded<Verbs, find_verbs>(); }

}  // namespace rejoin::transport::ibverbs
