#include "transport/ucx/library.h"

#include "base/shared_library.h"

namespace rejoin::transport::ucx {

namespace {

constexpr const char* kPackages = "Debian: libucx0; others: ucx, 1.13 or later";

Result<Ucx> find_ucx() {
  Ucx ucx;
  auto ucs = SharedLibrary::load("libucs.so.0", kPackages);
  if (!ucs) return tl::unexpected(ucs.error());
  ucs->find(ucx.status_string, "ucs_status_string");
  ucs->find(ucx.set_global_option, "ucs_global_opts_set_value");
  if (auto complete = ucs->complete(); !complete) return tl::unexpected(complete.error());
  auto ucp = SharedLibrary::load("libucp.so.0", kPackages);
  if (!ucp) return tl::unexpected(ucp.error());
#define REJOIN_FIND(name) ucp->find(ucx.name, "ucp_" #name);
  REJOIN_UCP(REJOIN_FIND)
#undef REJOIN_FIND
  if (auto complete = ucp->complete(); !complete) return tl::unexpected(complete.error());
  return ucx;
}

}  // namespace

Result<const Ucx*> load_ucx() { return load_once<Ucx, find_ucx>(); }
const Ucx& ucx() { return has_loaded<Ucx, find_ucx>(); }

}  // namespace rejoin::transport::ucx
