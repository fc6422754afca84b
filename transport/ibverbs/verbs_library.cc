#include "transport/ibverbs/verbs_library.h"

#include "base/fail.h"
#include "base/shared_library.h"

namespace rejoin::transport::ibverbs {

namespace {

Result<Verbs> load() {
  auto library = SharedLibrary::load("libibverbs.so.1", "Debian: libibverbs1 and ibverbs-providers; others: rdma-core");
  if (!library) return tl::unexpected(library.error());
  Verbs verbs;
#define REJOIN_FIND(name) library->find(verbs.name, "ibv_" #name);
  REJOIN_VERBS(REJOIN_FIND)
#undef REJOIN_FIND
  library->find(verbs.query_gid_of_size, "_ibv_query_gid_ex");
  library->find(verbs.query_port_of_old, "ibv_query_port");
  if (auto complete = library->complete(); !complete) return tl::unexpected(complete.error());
  return verbs;
}

const Result<Verbs>& loaded() {
  static const NeverDestroyed<Result<Verbs>> verbs(load());
  return *verbs;
}

}  // namespace

Result<const Verbs*> load_verbs() {
  if (!loaded()) return tl::unexpected(loaded().error());
  return &*loaded();
}

const Verbs& verbs() {
  REJOIN_CHECK(loaded(), "{}", loaded().error().message);
  return *loaded();
}

}  // namespace rejoin::transport::ibverbs
