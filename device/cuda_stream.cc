// CUDA's streams behind the seam.
#include <unistd.h>

#include <deque>

#include "base/fail.h"
#include "device/cuda_context.h"

namespace rejoin::device {

namespace {

using cuda::Driver;

class DriverStream final : public Stream {
 public:
  DriverStream(std::shared_ptr<const Primary> primary, cuda::StreamHandle stream, bool owned)
      : primary_(std::move(primary)), driver_(*primary_->driver), stream_(stream), owned_(owned) {}
  ~DriverStream() override {
    Current current(*primary_);
    if (owned_) (void)driver_.stream_synchronize(stream_);  // the calls before have returned its error
    for (const auto& mark : marks_) (void)driver_.event_destroy(mark.event);
    for (auto* event : spare_) (void)driver_.event_destroy(event);
    if (owned_) (void)driver_.stream_destroy(stream_);
  }

  Result<> copy(std::byte* to, const std::byte* from, std::size_t size) override {
    Current current(*primary_);
    return driver_.check(driver_.copy(pointer(to), pointer(from), size, stream_), "copying on a CUDA stream");
  }

  Result<> clear(std::byte* memory, std::size_t size) override {
    Current current(*primary_);
    return driver_.check(driver_.clear(pointer(memory), 0, size, stream_), "clearing GPU memory");
  }

  Result<> follow(Stream& other) override {
    auto& before = static_cast<DriverStream&>(other);
    const auto mark = before.mark();
    if (!mark) return tl::unexpected(mark.error());
    Current current(*primary_);
    return driver_.check(driver_.stream_wait_event(stream_, before.marks_.back().event, 0),
                         "letting one CUDA stream wait for another");
  }

  Result<> launch(Kernel which, Grid grid, const void* arguments) override {
    Current current(*primary_);
    const auto kernel = primary_->kernel(which);
    if (!kernel) return tl::unexpected(kernel.error());
    void* list[] = {const_cast<void*>(arguments)};  // the driver copies what it points to
    return driver_.check(driver_.launch(*kernel, grid.blocks, 1, 1, grid.threads, 1, 1, 0, stream_, list, nullptr),
                         "launching a kernel");
  }

  Result<> wait_until(const std::uint64_t* flag, std::uint64_t value) override {
    Current current(*primary_);
    return driver_.check(driver_.stream_wait_value(stream_, pointer(flag), value, cuda::kWaitGreaterOrEqual),
                         "letting a CUDA stream wait");
  }

  Result<> write(std::uint64_t* flag, std::uint64_t value) override {
    Current current(*primary_);
    return driver_.check(driver_.stream_write_value(stream_, pointer(flag), value, 0), "letting a CUDA stream tell");
  }

  Result<std::uint64_t> mark() override {
    Current current(*primary_);
    cuda::EventHandle event = nullptr;
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    } else if (auto made = driver_.check(driver_.event_create(&event, cuda::kEventNoTiming), "making a CUDA event");
               !made) {
      return tl::unexpected(made.error());
    }
    marks_.push_back({++last_, event});
    if (auto recorded = driver_.check(driver_.event_record(event, stream_), "recording a CUDA event"); !recorded)
      return tl::unexpected(recorded.error());
    return last_;
  }

  Result<std::uint64_t> reached() override {
    if (marks_.empty()) return last_;
    Current current(*primary_);
    while (!marks_.empty()) {
      const auto status = driver_.event_query(marks_.front().event);
      if (status == cuda::kNotReady) break;
      if (auto asked = driver_.check(status, "work on a CUDA stream"); !asked) return tl::unexpected(asked.error());
      spare_.push_back(marks_.front().event);
      marks_.pop_front();
    }
    return marks_.empty() ? last_ : marks_.front().number - 1;
  }

  Result<> signal(const Fd& eventfd) override {
    Current current(*primary_);
    const auto raise = [](void* fd) {
      const std::uint64_t one = 1;
      (void)!::write(static_cast<int>(reinterpret_cast<std::intptr_t>(fd)), &one, sizeof one);  // full is signalled too
    };
    return driver_.check(
        driver_.launch_host(stream_, raise, reinterpret_cast<void*>(static_cast<std::intptr_t>(eventfd.get()))),
        "a CUDA stream's host function");
  }

  Result<bool> idle() override {
    Current current(*primary_);
    const auto status = driver_.stream_query(stream_);
    if (status == cuda::kNotReady) return false;
    return driver_.check(status, "work on a CUDA stream").map([] { return true; });
  }

  Result<> synchronize() override {
    Current current(*primary_);
    return driver_.check(driver_.stream_synchronize(stream_), "work on a CUDA stream");
  }

  cuda::StreamHandle handle() override { return stream_; }

  Result<> takes_work() override {
    Current current(*primary_);
    int capturing = 0;
    if (auto asked = driver_.check(driver_.stream_is_capturing(stream_, &capturing), "asking for a stream's capture");
        !asked || capturing == 0)
      return asked;
    return fail(ErrorCode::invalid_argument,
                "this CUDA stream is being captured into a graph, which can't have what the CPU does meanwhile: hand "
                "over outside of the capture (torch.cuda.graph() and make_graphed_callables() capture)");
  }

 private:
  struct Mark {
    std::uint64_t number = 0;
    cuda::EventHandle event = nullptr;
  };
  std::shared_ptr<const Primary> primary_;
  const Driver& driver_;
  cuda::StreamHandle stream_;
  const bool owned_;
  std::uint64_t last_ = 0;
  std::deque<Mark> marks_;
  std::vector<cuda::EventHandle> spare_;
};

}  // namespace

std::unique_ptr<Stream> make_cuda_stream(std::shared_ptr<const Primary> primary, cuda::StreamHandle stream,
                                         bool owned) {
  return std::make_unique<DriverStream>(std::move(primary), stream, owned);
}

}  // namespace rejoin::device
