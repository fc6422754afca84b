#include "daemon/etcd_store.h"

#include <algorithm>

#include "base/clock.h"
#include "base/fail.h"
#include "daemon/etcd_request.h"

namespace rejoin::daemon {

using membership::StoreAnswer;
using membership::StoreRequest;

Result<std::unique_ptr<EtcdStore>> EtcdStore::create(asio::io_context& io, EtcdOptions options) {
  auto client = EtcdClient::create(io, options);
  if (!client) return tl::unexpected(client.error());
  return std::unique_ptr<EtcdStore>(new EtcdStore(std::move(*client), std::move(options)));
}

EtcdStore::EtcdStore(std::unique_ptr<EtcdClient> client, EtcdOptions options)
    : options_(std::move(options)), client_(std::move(client)) {}

EtcdStore::~EtcdStore() = default;

void EtcdStore::submit(const StoreRequest& request, std::function<void(StoreAnswer)> done) {
  REJOIN_CHECK(!under_way_, "one request at a time");
  const bool append = request.kind == StoreRequest::Kind::append;
  const TimePoint begun = SteadyClock().now();
  under_way_ = EtcdRequest::make(
      *client_, {options_.prefix}, request, [this, append, begun, done = std::move(done)](StoreAnswer answer) mutable {
        if (answer.outcome == StoreAnswer::Outcome::unknown) last_error_ = answer.error;
        if (append && answer.outcome == StoreAnswer::Outcome::done) {
          last_us_ = static_cast<std::uint64_t>((SteadyClock().now() - begun) / std::chrono::microseconds(1));
          ++appends_;
          total_us_ += last_us_;
          worst_us_ = std::max(worst_us_, last_us_);
        }
        under_way_.reset();
        const auto tell = std::move(done);
        tell(std::move(answer));  // and this may be gone
      });
  under_way_->begin();
}

EtcdStatus EtcdStore::status() const {
  return {.endpoints = options_.endpoints,
          .answered_last = client_->answered_last(),
          .last_error = last_error_,
          .appends = appends_,
          .last_us = last_us_,
          .mean_us = total_us_ / std::max<std::uint64_t>(1, appends_),
          .worst_us = worst_us_};
}

}  // namespace rejoin::daemon
