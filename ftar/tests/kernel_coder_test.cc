// A GPU's coder as its kernel's source has it, with all lanes of its warps, run by the CPU: the bits of the CPU's
// coder.
#include <gtest/gtest.h>

#include "base/sanitized.h"
#include "device/tests/cuda_language/cuda_language.h"
#include "ftar/tests/passes.h"
// … which the kernels are written in.
#include "device/kernels/kernels.cu"

namespace rejoin::ftar::coding {
namespace {

using device::kernels::Mailbox, device::kernels::Relay, device::kernels::Work;

PassResult run_kernel(const PassData& data) {
  struct alignas(16) Sixteen {
    std::byte bytes[16];
  };
  PassResult made = passes::room_for(data);
  Pass pass = data.pass;
  const std::size_t shift = data.shift * size_of(pass.type), room = data.bytes() / 16 + 8;
  std::vector<std::vector<Sixteen>> places(6, std::vector<Sixteen>(room));
  const auto place = [&](std::size_t which, std::size_t by) {
    return reinterpret_cast<std::byte*>(places[which].data()) + by;
  };
  const auto given = [&](const std::byte*& pointer, std::size_t which, const Bytes& bytes, std::size_t by) {
    if (pointer == nullptr) return;
    pointer = place(which, by);
    std::copy(bytes.begin(), bytes.end(), place(which, by));
  };
  given(pass.own, 0, data.own, shift);
  given(pass.arrived, 1, data.arrived, pass.arrived_width == Width::plain ? shift : 3);
  given(pass.feedback, 2, data.feedback, shift);
  if (pass.residual != nullptr) pass.residual = place(3, shift);
  if (pass.coded != nullptr) pass.coded = place(4, data.shift * 2);
  if (pass.out != nullptr) pass.out = place(5, shift);
  constexpr std::uint32_t tile = 1024;
  auto box = std::make_unique<Mailbox>();
  auto relay = std::make_unique<Relay>();
  box->works[1] = {.count = pass.count,
                   .tiles = static_cast<std::uint32_t>(std::max<std::size_t>(1, (data.bytes() + tile - 1) / tile)),
                   .tile = tile,
                   .type = Work::kPass};
  box->passes[1] = pass;
  box->posted = box->leave = 1;
  constexpr unsigned watch = 32;  // threads that do not work
  cuda_language::launch(
      device::kernels::rejoin_code, 1, 32 + watch,
      device::kernels::ReduceArguments{.mailbox = box.get(), .relay = relay.get(), .launch = 1, .patience_ns = 0});
  EXPECT_EQ(box->done[1], 1u);
  const auto take = [&](Bytes& bytes, const std::byte* from) { std::copy_n(from, bytes.size(), bytes.begin()); };
  take(made.residual, pass.residual);
  take(made.coded, pass.coded);
  take(made.out, pass.out);
  made.loss = box->losses[1];
  EXPECT_EQ(relay->losses[1].of, 0) << "is of the next work in this place";
  return made;
}

// Each lane is a thread of each pass, and they meet often: one pass in three, and fewer where that is dear.
TEST(KernelCoder, FourLanesThatShareABlockHaveTheCpusBits) {
  expect_the_cpus_bits({kSanitized ? 20u : 150u}, run_kernel, kSanitized ? 5 : 3);
}

}  // namespace
}  // namespace rejoin::ftar::coding
