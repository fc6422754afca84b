#include "ftar/coder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/fd.h"
#include "ftar/reduce.h"

namespace rejoin::ftar {

using coding::Loss, coding::Pass, coding::Width;

namespace {

bool only_adds(const Pass& pass) {
  return pass.width == Width::plain && pass.arrived_width == Width::plain && pass.own != nullptr &&
         pass.arrived != nullptr && pass.feedback == nullptr && pass.residual == nullptr;
}

class HostCoder final : public Coder {
 public:
  // Costs something only where it is used.
  Result<device::Memory> allocate(std::size_t size) override {
    auto made = Mapping::anonymous(size);
    if (!made) return tl::unexpected(made.error());
    auto mapping = std::make_shared<Mapping>(std::move(*made));
    return device::Memory{mapping->span(), mapping};
  }
  Result<double> rate() override { return coding::rate(); }
  Result<std::uint64_t> run(const Pass& pass, const std::shared_ptr<Loss>& loss) override {
    if (only_adds(pass)) add(pass.type, pass.out, pass.arrived, pass.own, pass.count, pass.divisor);
    else *loss += coding::run(pass);
    return 0;
  }
  Result<std::uint64_t> decode(DataType type, Width width, std::byte* out, const std::byte* coded,
                               std::size_t count) override {
    coding::decode(type, width, out, coded, count);
    return 0;
  }
  Result<std::uint64_t> clear(std::span<std::byte> memory) override {
    std::memset(memory.data(), 0, memory.size());
    return 0;
  }
};

class DeviceCoder final : public Coder {
 public:
  DeviceCoder(std::shared_ptr<device::Device> device, std::shared_ptr<device::Reducer> reducer)
      : device_(std::move(device)), reducer_(std::move(reducer)) {}

  Result<device::Memory> allocate(std::size_t size) override {
    auto memory = device_->allocate(size);
    if (!memory) return memory;
    if (auto zeros = device::zero_fresh(*device_, memory->bytes); !zeros) return tl::unexpected(zeros.error());
    return memory;
  }

  // Of chunks that come one after the other, from when one is given until it is seen to be done: the best of some.
  Result<double> rate() override {
    constexpr std::size_t count = 256 * 1024, bytes = count * sizeof(float);
    auto memory = allocate(3 * bytes);
    if (!memory) return tl::unexpected(memory.error());
    std::byte* own = memory->bytes.data();
    const Pass pass{.count = count,
                    .own = own,
                    .feedback = own + bytes,
                    .residual = own + bytes,
                    .width = Width::eight,
                    .coded = own + 2 * bytes};
    double best = 0;
    for (int turn = 0; turn < 5; ++turn) {
      const auto before = std::chrono::steady_clock::now();
      for (const bool codes : {true, false}) {
        const auto given = codes ? run(pass, nullptr) : decode(pass.type, pass.width, own, pass.coded, count);
        if (auto done = wait(given); !done) return tl::unexpected(done.error());
      }
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
      best = std::max(best, static_cast<double>(bytes) / took.count());
    }
    reducer_->rest();  // whoever frees memory waits for the kernel
    return best;
  }

  Result<std::uint64_t> run(const Pass& pass, const std::shared_ptr<Loss>& loss) override {
    if (only_adds(pass)) return reducer_->add(pass.type, pass.out, pass.arrived, pass.own, pass.count, pass.divisor);
    return reducer_->code(pass, loss);
  }
  Result<std::uint64_t> decode(DataType type, Width width, std::byte* out, const std::byte* coded,
                               std::size_t count) override {
    return reducer_->code({.type = type, .count = count, .arrived = coded, .arrived_width = width, .out = out},
                          nullptr);
  }
  Result<std::uint64_t> clear(std::span<std::byte> memory) override {
    constexpr DataType type = DataType::bfloat16;  // of the smallest
    return reducer_->code({.type = type, .count = memory.size() / size_of(type), .residual = memory.data()}, nullptr);
  }

 private:
  // Before anything is reduced: this thread may launch the kernel, whoever does otherwise.
  Result<> wait(const Result<std::uint64_t>& given) {
    auto done = given;
    for (; done && !reducer_->idle(); done = reducer_->done()) {
      std::this_thread::yield();
      if (!reducer_->wants_launch()) continue;
      if (auto launched = reducer_->launch_if_wanted(); !launched) return launched;
    }
    return done ? Result<>() : tl::unexpected(done.error());
  }

  const std::shared_ptr<device::Device> device_;
  const std::shared_ptr<device::Reducer> reducer_;
};

}  // namespace

std::unique_ptr<Coder> make_host_coder() { return std::make_unique<HostCoder>(); }

std::unique_ptr<Coder> make_coder(std::shared_ptr<device::Device> device, std::shared_ptr<device::Reducer> reducer) {
  return std::make_unique<DeviceCoder>(std::move(device), std::move(reducer));
}

}  // namespace rejoin::ftar
