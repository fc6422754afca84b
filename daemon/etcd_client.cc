#include "daemon/etcd_client.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/etcd_address.h"
#include "daemon/etcd_channel.h"
#include "daemon/etcd_client_parts.h"

namespace rejoin::daemon {

namespace {

constexpr const char* kTxn = "/etcdserverpb.KV/Txn";
constexpr const char* kStatus = "/etcdserverpb.Maintenance/Status";
constexpr const char* kAuthenticate = "/etcdserverpb.Auth/Authenticate";

// All of gRPC's timers wait for an hour when the system's clock is set back by one. So a timer of our own ends each
// try, and where there is no connection after twice the time in which gRPC would have tried again, a new channel does.
constexpr std::chrono::milliseconds kOnItsOwn{2 * (etcd_client::kConnectMs + etcd_client::kMostPauseMs)};
constexpr std::chrono::milliseconds kAuthenticateWithin{2000};
// Within so many seconds, in which this process ran, gRPC lets go of a call that was cancelled, or not at all.
constexpr int kLetsGoWithin = 10, kLetsGoAtTheEndWithin = 2;

class GrpcClient final : public EtcdClient {
 public:
  GrpcClient(asio::io_context& io, const EtcdOptions& options, std::shared_ptr<grpc::ChannelCredentials> credentials)
      : io_(io), options_(options), credentials_(std::move(credentials)), links_(options.endpoints.size()), late_(io) {
    under_way_->io = &io_;
    for (const std::string& endpoint : options_.endpoints)
      addresses_.push_back(std::make_unique<etcd_client::Address>(io_, endpoint));
  }

  ~GrpcClient() override {
    alive_.reset();
    if (call_) call_->context.TryCancel();
    std::unique_lock lock(under_way_->mutex);
    for (int second = 0; under_way_->calls > 0 && second < kLetsGoAtTheEndWithin; ++second)
      under_way_->ended.wait_for(lock, std::chrono::seconds(1), [this] { return under_way_->calls == 0; });
    under_way_->io = nullptr;
    if (under_way_->calls == 0) return;
    spdlog::error("{}", etcd_client::kStuck);
    if (call_) abandoned_.push_back(std::move(call_));
    for (auto& call : abandoned_) (void)call.release();  // gRPC has them
  }

  void transact(const etcd::TxnRequest& transaction, Done done) override {
    REJOIN_CHECK(!request_, "one transaction at a time");
    request_.emplace(Request{.bytes = transaction.SerializeAsString(),
                             .on_success = transaction.success_size(),
                             .on_failure = transaction.failure_size(),
                             .writes = !std::ranges::all_of(transaction.success(), &etcd::RequestOp::has_request_range),
                             .done = std::move(done)});
    work_.emplace(io_.get_executor());
    try_endpoint();
  }

  std::optional<membership::Store::Overdue> overdue() const override {
    if (!call_ || !call_->stuck) return std::nullopt;
    return membership::Store::Overdue{with_endpoint(etcd_client::kStuck), asked_at_};
  }

  void status(std::function<void(Result<etcd::StatusResponse>)> done) override {
    REJOIN_CHECK(!request_, "not during a transaction");
    request_.emplace(Request{});
    status_done_ = std::move(done);
    work_.emplace(io_.get_executor());
    start(kStatus, "", &GrpcClient::on_status);
  }

 private:
  struct Request {
    std::string bytes;
    int on_success = 0, on_failure = 0;  // answers of either branch
    bool writes = false;
    Done done;
    std::size_t tried = 0;  // endpoints
    std::size_t late = 0;   // of these
    bool renewed = false;   // a token was asked for at this endpoint, since it did not like the one before
    std::string errors;     // of the endpoints before
  };
  struct Link {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<grpc::GenericStub> stub;  // null: to be made anew
    TimePoint made{};
    std::string unresolved;  // why it has the addresses of before
  };
  using Then = void (GrpcClient::*)(const grpc::Status&, const std::string&);
  struct Call {
    const Then then;
    bool late = false, stuck = false;
    grpc::ClientContext context;
    grpc::ByteBuffer request, answer;
  };
  struct UnderWay {  // shared with gRPC's threads
    std::mutex mutex;
    std::condition_variable ended;
    asio::io_context* io = nullptr;  // null: the client is gone
    int calls = 0;
  };

  std::size_t endpoint() const { return (first_ + request_->tried) % options_.endpoints.size(); }

  void try_endpoint() {
    if (!options_.user.empty() && token_.empty() && !open_) return authenticate();
    start(kTxn, request_->bytes, &GrpcClient::transacted);
  }

  void authenticate() {
    if (const Error* refusal = password_.refused(SteadyClock().now())) {
      asio::post(io_, [this, why = *refusal, alive = std::weak_ptr<char>(alive_)] {
        if (!alive.expired()) finish(tl::unexpected(why));
      });
      return;
    }
    etcd::AuthenticateRequest request;
    request.set_name(options_.user);
    request.set_password(password_.show());
    start(kAuthenticate, request.SerializeAsString(), &GrpcClient::authenticated);
  }

  void start(const char* method, const std::string& bytes, Then then) {
    asked_at_ = SteadyClock().now();
    if (!links_[endpoint()].stub) return connect(method, bytes, then);
    call_.reset(new Call{.then = then});
    const grpc::Slice slice(bytes);
    call_->request = grpc::ByteBuffer(&slice, 1);
    const auto within = try_within(then);
    end_after(within);
    call_->context.set_deadline(  // for etcd to know it
        ::gpr_time_add(::gpr_now(GPR_CLOCK_MONOTONIC), ::gpr_time_from_millis(within.count(), GPR_TIMESPAN)));
    if (!token_.empty() && then == &GrpcClient::transacted) call_->context.AddMetadata("token", token_);
    {
      const std::lock_guard lock(under_way_->mutex);
      ++under_way_->calls;
    }
    // In a thread of gRPC's.
    auto ended = [this, of = call_.get(), under_way = under_way_,
                  alive = std::weak_ptr<char>(alive_)](const grpc::Status& status) {
      const std::lock_guard lock(under_way->mutex);
      if (under_way->io != nullptr)
        asio::post(*under_way->io, [this, of, alive, status] {
          if (!alive.expired()) ended_with(*of, status);
        });
      --under_way->calls;
      under_way->ended.notify_all();
    };
    links_[endpoint()].stub->UnaryCall(&call_->context, method, {}, &call_->request, &call_->answer, std::move(ended));
  }

  void ended_with(const Call& call, const grpc::Status& status) {
    if (&call != call_.get()) {
      std::erase_if(abandoned_, [&](const auto& one) { return one.get() == &call; });
      return;
    }
    grpc::Slice answer;
    std::string text;
    late_.cancel();
    if (!status.ok()) disconnect_if_stuck();
    if (status.ok() && call_->answer.DumpToSingleSlice(&answer).ok())
      text.assign(reinterpret_cast<const char*>(answer.begin()), answer.size());
    const bool late = call_->late && status.error_code() == grpc::StatusCode::CANCELLED;
    const Then then = call_->then;
    call_.reset();
    (this->*then)(late ? grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded") : status, text);
  }

  // Starts it when there is a channel. Where the name is not resolved now, it goes to the addresses of before.
  void connect(const char* method, const std::string& bytes, Then then) {
    etcd_client::Address& address = *addresses_[endpoint()];
    auto found = [this, &address, method, bytes, then](const Result<>& resolved) {
      if (address.target().empty())
        return (this->*then)(grpc::Status(grpc::StatusCode::UNAVAILABLE, resolved.error().message), "");
      Link& link = links_[endpoint()];
      link.channel = etcd_client::connect(address.target(), options_.endpoints[endpoint()], credentials_);
      link.stub = std::make_unique<grpc::GenericStub>(link.channel);
      link.made = SteadyClock().now();
      link.unresolved = resolved ? "" : resolved.error().message;
      start(method, bytes, then);
    };
    if (!address.has_name()) return found({});
    found_ = std::move(found);
    address.ask([this, of = endpoint()](const Result<>& resolved) {
      if (found_ && endpoint() == of) on_found(resolved);  // it may be too late
    });
    const auto within = deadline();
    late_.expires_after(within);
    late_.async_wait([this, within, alive = std::weak_ptr<char>(alive_)](asio::error_code error) {
      if (error || alive.expired() || !found_ || late_.expiry() > std::chrono::steady_clock::now()) return;
      on_found(fail(ErrorCode::unavailable, "its name is not resolved: no answer within {} ms", within.count()));
    });
  }

  void on_found(const Result<>& resolved) {
    late_.cancel();
    std::exchange(found_, nullptr)(resolved);
  }

  // gRPC tries one address after the other. The name is asked for anew.
  void disconnect_if_stuck() {
    Link& link = links_[endpoint()];
    const auto patience = kOnItsOwn * std::max<std::size_t>(addresses_[endpoint()]->count(), 1);
    if (SteadyClock().now() - link.made < patience || link.channel->GetState(false) == GRPC_CHANNEL_READY) return;
    link.stub.reset();
    link.channel.reset();
  }

  void end_after(std::chrono::milliseconds deadline) {
    late_.expires_after(deadline);
    late_.async_wait([this, alive = std::weak_ptr<char>(alive_)](asio::error_code error) {
      if (error || alive.expired() || !call_ || late_.expiry() > std::chrono::steady_clock::now()) return;
      call_->late = true;
      call_->context.TryCancel();
      abandon_after(kLetsGoWithin);
    });
  }

  void abandon_after(int seconds) {
    late_.expires_after(std::chrono::seconds(1));
    late_.async_wait([this, seconds, alive = std::weak_ptr<char>(alive_)](asio::error_code error) {
      if (error || alive.expired() || !call_ || late_.expiry() > std::chrono::steady_clock::now()) return;
      if (seconds == kLetsGoWithin - 2) call_->stuck = true, spdlog::warn("{}", with_endpoint(etcd_client::kStuck));
      if (seconds > 1) return abandon_after(seconds - 1);
      if (options_.stuck) return options_.stuck(etcd_client::kStuck);
      const Then then = call_->then;
      abandoned_.push_back(std::move(call_));
      links_[endpoint()] = {};
      (this->*then)(grpc::Status(grpc::StatusCode::UNAVAILABLE, etcd_client::kStuck), "");
    });
  }

  void authenticated(const grpc::Status& status, const std::string& bytes) {
    etcd::AuthenticateResponse answer;
    if (status.ok() && answer.ParseFromString(bytes) && !answer.token().empty()) {
      token_ = answer.token();
      password_.on_taken();
      return try_endpoint();
    }
    if (status.ok()) return failed("its answer is none of etcd's");
    if (status.error_message().find("authentication is not enabled") == std::string::npos) return refused(status);
    open_ = true;  // for everybody
    try_endpoint();
  }

  void transacted(const grpc::Status& status, const std::string& bytes) {
    const std::string& text = status.error_message();
    etcd::TxnResponse answer;
    if (status.ok()) {
      if (!answer.ParseFromString(bytes) ||
          answer.responses_size() != (answer.succeeded() ? request_->on_success : request_->on_failure))
        return failed("its answer is none of etcd's");
      if (const auto why = clusters_.on_answer(endpoint(), answer.header().cluster_id()); !why.empty()) {
        ++request_->late;  // the others may be
        return failed(why);
      }
      answered();
      return finish(std::move(answer));
    }
    if (!options_.user.empty() && !request_->renewed && etcd_client::asks_for_token(text)) {
      request_->renewed = true;
      token_.clear();
      open_ = false;
      return authenticate();
    }
    if (text.find("required revision has been compacted") != text.npos) {
      answered();
      return finish(fail(ErrorCode::not_found, "{}", with_endpoint(text)));
    }
    refused(status);
  }

  void on_status(const grpc::Status& status, const std::string& bytes) {
    Result<etcd::StatusResponse> answer;
    if (!status.ok()) answer = fail(ErrorCode::unavailable, "{}", with_endpoint(status.error_message()));
    else if (!answer->ParseFromString(bytes))
      answer = fail(ErrorCode::unavailable, "{}", with_endpoint("its answer is none of etcd's"));
    const auto done = std::move(status_done_);
    request_.reset();
    work_.reset();
    done(std::move(answer));  // and this may be gone
  }

  // An error, of which etcd's members would all say the same, or only this one.
  void refused(const grpc::Status& status) {
    const std::string& text = status.error_message();
    if (const char* remedy = etcd_client::remedy_for(text)) {
      answered();
      Error why{ErrorCode::refused, fmt::format("{}{}: {}", request_->errors, with_endpoint(text), remedy)};
      if (etcd_client::refuses_password(text)) why = password_.on_refused(std::move(why), SteadyClock().now());
      return finish(tl::unexpected(std::move(why)));
    }
    const bool late =
        status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED && text.find("etcdserver") == text.npos;
    if (late || text == "context deadline exceeded") {  // as etcd says it
      ++request_->late;
      return failed(fmt::format("no answer within {} ms", deadline().count()));
    }
    failed(text.empty() ? fmt::format("error {}", static_cast<int>(status.error_code())) : text);
  }

  // This endpoint has not said what became of the transaction.
  void failed(const std::string& why) {
    request_->errors += with_endpoint(why);
    if (const auto& reason = links_[endpoint()].unresolved; !reason.empty())
      request_->errors += fmt::format(" (where it was before: {})", reason);
    request_->renewed = false;
    if (++request_->tried == options_.endpoints.size()) {
      // One that is slow would be asked again and again otherwise, do everything, and be heard never.
      if (2 * request_->late > request_->tried && deadline() < options_.longest) {
        deadline() = std::min(2 * deadline(), options_.longest);
        request_->errors += "; the next try has longer. Where etcd is always so slow, give all a longer --silence-ms";
      }
      return finish(fail(ErrorCode::unavailable, "{}", request_->errors));
    }
    request_->errors += "; ";
    try_endpoint();
  }

  std::string with_endpoint(const std::string& text) const {
    return fmt::format("etcd at {}: {}", options_.endpoints[endpoint()], text);
  }
  void answered() {
    first_ = endpoint();
    request_->tried = request_->late = 0;
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock().now() - asked_at_);
    deadline() = std::clamp(2 * took, options_.deadline, options_.longest);
  }
  // A password is to take its time: etcd's bcrypt needs 100 ms and more.
  std::chrono::milliseconds try_within(Then then) {
    return then == &GrpcClient::transacted ? deadline() : std::max(kAuthenticateWithin, deadline());
  }
  // Of a try. That reads are answered at once says nothing of writes, for which a disk is waited.
  std::chrono::milliseconds& deadline() { return request_->writes ? writes_within_ : reads_within_; }
  void finish(Result<etcd::TxnResponse> answer) {
    const Done done = std::move(request_->done);
    request_.reset();
    work_.reset();
    done(std::move(answer));  // and this may be gone
  }

  asio::io_context& io_;
  const EtcdOptions options_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  std::vector<Link> links_;                                       // of each endpoint
  std::vector<std::unique_ptr<etcd_client::Address>> addresses_;  // as many
  std::function<void(const Result<>&)> found_;                    // while a try waits for one of them
  std::size_t first_ = 0;                                         // the endpoint to be tried first
  std::string token_;
  etcd_client::Password password_{options_};
  etcd_client::Clusters clusters_{options_.endpoints};
  std::chrono::milliseconds reads_within_ = options_.deadline, writes_within_ = options_.deadline;  // the next try
  TimePoint asked_at_{};                                                                            // the last one
  bool open_ = false;  // etcd asks nobody for a token
  std::optional<Request> request_;
  std::function<void(Result<etcd::StatusResponse>)> status_done_;
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work_;
  // It ends in this thread: it holds the channel, and the last channel to go ends gRPC's threads, which must not be
  // done by one of them.
  std::unique_ptr<Call> call_;
  std::vector<std::unique_ptr<Call>> abandoned_;  // which gRPC has not let go of
  asio::steady_timer late_;                       // the call
  const std::shared_ptr<UnderWay> under_way_ = std::make_shared<UnderWay>();
  std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace

Result<std::unique_ptr<EtcdClient>> EtcdClient::create(asio::io_context& io, const EtcdOptions& options) {
  if (auto usable = etcd_client::check(options); !usable) return tl::unexpected(usable.error());
  if (auto can_run = etcd_client::has_threads(); !can_run) return tl::unexpected(can_run.error());
  auto credentials = etcd_client::credentials_of(options);
  if (!credentials) return tl::unexpected(credentials.error());
  etcd_client::log_quietly();
  return std::make_unique<GrpcClient>(io, options, *credentials);
}

}  // namespace rejoin::daemon
