// The two sides' connection: a control connection over TCP that tells the client where the server's engine listens, and
// between the engines the endpoint that is measured.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "base/fd.h"
#include "bench/perf/options.h"
#include "device/device.h"
#include "transport/transport.h"

namespace rejoin::bench::perf {

class Link {
 public:
  static Result<std::unique_ptr<Link>> open(const Options& options);

  transport::Engine& engine() { return *engine_; }
  transport::EndpointId endpoint() const { return endpoint_; }
  TimePoint now() const { return clock_.now(); }
  // Twice the largest size: what is sent, what is received. With --use_cuda a GPU's: only put() and get() get at it.
  std::span<std::byte> memory() { return memory_.bytes; }
  std::span<std::byte> outbox() { return memory().first(memory().size() / 2); }
  std::span<std::byte> inbox() { return memory().subspan(memory().size() / 2); }
  Result<> put(std::span<std::byte> there, BytesView bytes);
  Result<Bytes> get(BytesView there);
  std::string memory_name() const;
  transport::RegionId region() const { return region_; }
  const transport::RemoteRegion& remote() const { return remote_; }

  // Polls, handing each event on; an endpoint that ends is an error.
  Result<> poll(const std::function<void(const transport::Event&)>& on_event);
  Result<> until(const std::function<bool()>& done, const std::function<void(const transport::Event&)>& on_event = {});
  // The caller's messages so far. Counted here, since one may come in the same poll() as the other side's meet().
  std::uint64_t messages() const { return messages_; }
  // With --events: until something has happened.
  void wait_for_event();
  // Both sides have come here.
  Result<> meet();

 private:
  Link() = default;
  Result<> connect(const Options& options);

  SteadyClock clock_;
  bool events_ = false;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<transport::Engine> control_, engine_;
  transport::EndpointId endpoint_;
  device::Memory memory_;
  transport::RegionId region_;
  transport::RemoteRegion remote_;
  std::optional<Bytes> agreement_;  // the peer's first message
  int idle_polls_ = 0;
  std::optional<Error> ended_;  // heard behind all that the other side has sent, which may be all that it had to say
  std::uint64_t meetings_ = 0, met_ = 0, messages_ = 0;
};

}  // namespace rejoin::bench::perf
