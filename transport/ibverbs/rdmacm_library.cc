#include "transport/ibverbs/rdmacm_library.h"

#include "base/shared_library.h"

namespace rejoin::transport::ibverbs {

namespace {

Result<RdmaCm> find_rdmacm() {
  auto library = SharedLibrary::load("librdmacm.so.1", "Debian: librdmacm1; others: rdma-core");
  if (!library) return tl::unexpected(library.error());
  RdmaCm rdmacm;
#define REJOIN_FIND(name) library->find(rdmacm.name, "rdma_" #name);
  REJOIN_RDMACM(REJOIN_FIND)
#undef REJOIN_FIND
  if (auto complete = library->complete(); !complete) return tl::unexpected(complete.error());
  return rdmacm;
}

}  // namespace

Result<const RdmaCm*> load_rdmacm() { return load_once<RdmaCm, find_rdmacm>(); }
const RdmaCm& rdmacm() { return has_loaded<RdmaCm, find_rdmacm>(); }

}  // namespace rejoin::transport::ibverbs
