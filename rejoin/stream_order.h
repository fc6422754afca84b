// What a trainer's CUDA streams and the session's progress thread wait for of each other, so that the trainer's thread
// waits for neither: a bucket is reduced when the stream has come to where it was handed over, and the stream goes on
// from there when it has been reduced; a new version is published when the stream has updated it.
#pragma once

#include <deque>
#include <map>
#include <mutex>

#include "device/device.h"

namespace rejoin {

class StreamOrder {
 public:
  // `wake` is signalled whenever poll() will have something; it outlives this.
  static Result<std::unique_ptr<StreamOrder>> make(std::shared_ptr<device::Device> device, std::size_t buckets,
                                                   const Fd& wake);
  ~StreamOrder();  // lets all streams go on, and waits until they are past what they waited for

  // ---- the trainer's thread. Streams are cudaStream_t. Errors: of the device.
  // The bucket, at this step, is ready when the stream comes here. What is queued on it later waits until on_reduced().
  Result<> hand_over(std::uint32_t bucket, std::uint64_t step, void* stream);
  // The update of a step is done when the stream comes here.
  Result<> updated(std::uint64_t step, bool contributed, void* stream);

  // ---- the progress thread
  struct Reached {
    std::optional<std::uint32_t> bucket;  // none: an update
    std::uint64_t step = 0;
    bool contributed = false;
  };
  // What streams have come to since the last call, in order.
  Result<std::vector<Reached>> poll();
  void on_reduced(std::uint32_t bucket, std::uint64_t step);
  void release();  // nothing waits any more, whatever becomes of the steps

 private:
  struct Waiting {
    std::uint64_t mark = 0;
    Reached what;
  };
  StreamOrder(std::shared_ptr<device::Device> device, const Fd& wake) : device_(std::move(device)), wake_(wake) {}
  Result<> await(Reached what, void* stream);
  Result<device::Stream*> adopted(void* stream);

  std::shared_ptr<device::Device> device_;
  const Fd& wake_;
  device::Memory reduced_;                                    // pinned: by bucket, the last step that it was reduced in
  std::map<void*, std::unique_ptr<device::Stream>> streams_;  // the trainer's; its thread's
  std::unique_ptr<device::Stream> waits_;                     // behind all that they wait for; likewise
  std::mutex mutex_;                                          // guards what follows
  std::unique_ptr<device::Stream> side_;  // follows the trainer's streams, which thus never wait for the host
  std::deque<Waiting> waiting_;
};

}  // namespace rejoin
