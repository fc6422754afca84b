#include "device/copier.h"

#include <thread>

namespace rejoin::device {

namespace {

class StreamCopier final : public Copier {
 public:
  explicit StreamCopier(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  Result<std::uint64_t> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    return stream_->copy(to, from, size).and_then([&] { return stream_->mark(); });
  }
  Result<std::uint64_t> done() override { return stream_->reached(); }
  bool signal(const Fd& eventfd) override { return stream_->signal(eventfd).has_value(); }
  Result<> finish() override { return stream_->synchronize(); }

 private:
  std::unique_ptr<Stream> stream_;
};

class ReducerCopier final : public Copier {
 public:
  explicit ReducerCopier(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  ~ReducerCopier() override { (void)finish(); }  // the calls before have returned its error
  Result<std::uint64_t> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    const auto number = reducer_->copy(to, from, size);
    if (number) last_ = *number;
    return number;
  }
  Result<std::uint64_t> done() override { return reducer_->done(); }
  bool signal(const Fd&) override { return false; }
  Result<> finish() override {
    for (;; std::this_thread::yield()) {
      const auto done = reducer_->done();
      if (!done) return tl::unexpected(done.error());
      if (*done >= last_) return {};
      (void)reducer_->wants_launch();
    }
  }

 private:
  std::shared_ptr<Reducer> reducer_;
  std::uint64_t last_ = 0;
};

}  // namespace

Result<std::unique_ptr<Copier>> make_stream_copier(Device& device) {
  auto stream = device.make_stream();
  if (!stream) return tl::unexpected(stream.error());
  return std::make_unique<StreamCopier>(std::move(*stream));
}

std::unique_ptr<Copier> make_copier(std::shared_ptr<Reducer> reducer) {
  return std::make_unique<ReducerCopier>(std::move(reducer));
}

}  // namespace rejoin::device
