// A trainer's optimizer on a GPU, as nvcc compiles it with the library's headers; nothing runs it.
#include "base/command_line.h"
#include "rejoin/c.h"
#include "rejoin/checkpoint_transfer.h"
#include "rejoin/log.h"
#include "rejoin/process_group.h"
#include "rejoin/session.h"
#include "transport/factory.h"
#include "transport/idle.h"

__global__ void descend(float* weight, const float* gradient, std::uint64_t count, float rate) {
  const std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
  if (i < count) weight[i] -= rate * gradient[i];
}

rejoin::Result<> train(rejoin::Session& session, rejoin::TensorId tensor, rejoin::CudaStream stream) {
  const auto bytes = session.weight(tensor);
  if (!bytes) return tl::unexpected(bytes.error());
  const auto weight = rejoin::Session::as<float>(*bytes);
  return session.commit(
      [&](const rejoin::Update& update) {
        constexpr unsigned kThreads = 256;
        const auto blocks = static_cast<unsigned>((update.count + kThreads - 1) / kThreads);
        const auto part = update.of(weight);
        descend<<<blocks, kThreads, 0, stream>>>(part.data(), update.gradient_as<float>().data(), part.size(), 0.1f);
      },
      stream);
}
