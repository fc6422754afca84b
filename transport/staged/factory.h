// Staging: one engine that takes a device's memory over any engine that can't reach it, through pinned host memory.
// Where the engine below reaches the device's memory itself (by dma-buf, or as peer memory), nothing is staged.
#pragma once

#include <memory>

#include "device/reducer.h"
#include "transport/transport.h"

namespace rejoin::transport::staged {

struct Options {
  // What is copied and sent at a time: fragments of a write of 1 MiB are copied out, read and copied in at once.
  std::size_t slot_bytes = 256 * KiB;
  std::size_t slots = 32;  // each way; at least 2, so that one is copied while another is sent
  bool direct = true;      // false: staged also where it could be reached directly
  // Registering a device's memory exports it as a dma-buf. False: it calls no driver, and who has a dma-buf gives that.
  bool exports = true;
};

// Both ends of a connection must be such engines. Addresses and endpoints are those of the engine below. `reducer`:
// what it copies by, where it may not call the device's driver once memory is registered; else by streams of its own.
// Errors: of the device, where it gives no pinned memory or stream; `invalid_argument` for slots of no size.
Result<std::unique_ptr<Engine>> make_engine(std::unique_ptr<Engine> below, std::shared_ptr<device::Device> device,
                                            const Options& options, std::shared_ptr<device::Reducer> reducer = nullptr);

}  // namespace rejoin::transport::staged
