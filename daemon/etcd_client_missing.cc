#include "base/fail.h"
#include "daemon/etcd_client.h"

namespace rejoin::daemon {

Result<std::unique_ptr<EtcdClient>> EtcdClient::create(asio::io_context&, const EtcdOptions&) {
  return fail(
      ErrorCode::unavailable,
      "this build can't speak to etcd, because gRPC was missing where it was built; install libgrpc++-dev there "
      "and build again");
}

}  // namespace rejoin::daemon
