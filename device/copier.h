// Copies between a device's memory and pinned memory of the host, one after the other: by a stream, or by the works of
// a reducer, which take no call of the driver ("No driver between hand-over and flag" in docs/design-notes.md).
// Thread: one at a time.
#pragma once

#include <memory>

#include "device/device.h"
#include "device/reducer.h"

namespace rejoin::device {

class Copier {
 public:
  virtual ~Copier() = default;  // waits for what is queued
  // Both ends stay as they are until it is done. Numbers grow. Errors: of the device; nothing works on it any more.
  virtual Result<std::uint64_t> copy(std::byte* to, const std::byte* from, std::size_t size) = 0;
  virtual Result<std::uint64_t> done() = 0;  // everything up to this number is; errors: likewise
  // The eventfd is signalled when what is queued now is done. False: nobody is woken, so call done() again and again.
  virtual bool signal(const Fd& eventfd) = 0;
  virtual Result<> finish() = 0;  // waits for all that is queued
};

Result<std::unique_ptr<Copier>> make_stream_copier(Device& device);
std::unique_ptr<Copier> make_copier(std::shared_ptr<Reducer> reducer);

}  // namespace rejoin::device
