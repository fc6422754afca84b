#include "daemon/etcd_store.h"

#include "base/fail.h"
#include "daemon/etcd_request.h"

namespace rejoin::daemon {

using membership::StoreAnswer;
using membership::StoreRequest;

Result<std::unique_ptr<EtcdStore>> EtcdStore::create(asio::io_context& io, EtcdOptions options) {
  auto client = EtcdClient::create(io, options);
  if (!client) return tl::unexpected(client.error());
  return std::unique_ptr<EtcdStore>(new EtcdStore(std::move(*client), std::move(options.prefix)));
}

EtcdStore::EtcdStore(std::unique_ptr<EtcdClient> client, std::string prefix)
    : prefix_(std::move(prefix)), client_(std::move(client)) {}

EtcdStore::~EtcdStore() = default;

void EtcdStore::submit(const StoreRequest& request, std::function<void(StoreAnswer)> done) {
  REJOIN_CHECK(!under_way_, "one request at a time");
  under_way_ =
      EtcdRequest::make(*client_, {prefix_}, request, [this, done = std::move(done)](StoreAnswer answer) mutable {
        under_way_.reset();
        const auto tell = std::move(done);
        tell(std::move(answer));  // and this may be gone
      });
  under_way_->begin();
}

}  // namespace rejoin::daemon
