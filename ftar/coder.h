// Who does the arithmetic of a ring's hops: the CPU, at once, or a GPU, whose works end later and wake nobody. The bits
// are the same.
#pragma once

#include <memory>

#include "device/reducer.h"
#include "ftar/coding.h"

namespace rejoin::ftar {

// Memory is of the kind that the coder works on, whatever points there. Thread: one at a time.
class Coder {
 public:
  virtual ~Coder() = default;
  // Zeros, for what coding has lost.
  virtual Result<device::Memory> allocate(std::size_t size) = 0;
  // Bytes of elements a second that are coded and decoded, as a hop does it.
  virtual Result<double> rate() = 0;

  // Each returns the number of the work, as Reducer's; 0: it is done already. Works under way run beside each other.
  // Errors: of the device.
  // Of types that are not coded: additions only. What is lost is added to `loss` once it is done.
  virtual Result<std::uint64_t> run(const coding::Pass& pass, const std::shared_ptr<coding::Loss>& loss) = 0;
  virtual Result<std::uint64_t> decode(DataType type, coding::Width width, std::byte* out, const std::byte* coded,
                                       std::size_t count) = 0;
  virtual Result<std::uint64_t> clear(std::span<std::byte> memory) = 0;  // whole elements
};

std::unique_ptr<Coder> make_host_coder();
// To code, the reducer must be one that does (ReducerOptions::codes).
std::unique_ptr<Coder> make_coder(std::shared_ptr<device::Device> device, std::shared_ptr<device::Reducer> reducer);

}  // namespace rejoin::ftar
