// StreamOrder keeps a trainer's CUDA streams and the session's progress thread in order, so that the trainer's thread
// waits for neither: the session reduces a bucket when the stream has come to where it was handed over, the stream goes
// on from there when the bucket has been reduced, and a new version is published when the stream has updated it.
//
// Each waits for flags in pinned memory that the other writes: "No driver between hand-over and flag" in
// docs/design-notes.md.
#pragma once

#include <functional>
#include <map>
#include <mutex>

#include "device/device.h"
#include "device/reducer.h"

namespace rejoin {

class StreamOrder {
 public:
  // `reducer` stays on the device while a stream waits. `wake` is called on the trainer's thread when
  // waits_for_streams() becomes true: from then on somebody is to poll(). Errors: `unavailable` (a device whose streams
  // wait for no flags); of the device.
  static Result<std::unique_ptr<StreamOrder>> make(std::shared_ptr<device::Device> device,
                                                   std::shared_ptr<device::Reducer> reducer, std::size_t buckets,
                                                   std::function<void()> wake);
  ~StreamOrder();  // lets all streams go on, and waits until they are past what they waited for

  // ---- the trainer's threads, one at a time. Streams are cudaStream_t. Errors: of the device.
  Result<> takes(CudaStream stream);  // `invalid_argument` where it is being captured into a graph
  // The bucket, at this step, is ready when the stream comes here. What is queued on it later waits until on_reduced().
  Result<> hand_over(std::uint32_t bucket, std::uint64_t step, CudaStream stream);
  // The update of a step is done when the stream comes here.
  Result<> updated(std::uint64_t step, bool contributed, CudaStream stream);

  // ---- any thread; none calls the driver, nor waits for one that does
  struct Reached {
    std::optional<std::uint32_t> bucket;  // none: an update
    std::uint64_t step = 0;
    bool contributed = false;
  };
  // Returns the points that streams have come to since the last call.
  std::vector<Reached> poll();
  bool waits_for_streams() const;  // poll() will have something: nobody is woken when it has
  bool streams_wait() const;       // for on_reduced()
  void on_reduced(std::uint32_t bucket, std::uint64_t step);
  void release();  // nothing waits any more, whatever becomes of the steps

 private:
  // Of a bucket: the last step that its stream has handed it over in, has gone on in, and that it was reduced in. (The
  // last of them is for updates.)
  struct Flags;
  StreamOrder(std::shared_ptr<device::Device> device, std::shared_ptr<device::Reducer> reducer, std::size_t buckets,
              std::function<void()> wake)
      : device_(std::move(device)),
        reducer_(std::move(reducer)),
        wake_(std::move(wake)),
        handed_over_(buckets),
        held_(buckets) {}
  Flags& flags(std::size_t which) const;
  void await(const Reached& what);
  Result<> hold(std::uint32_t bucket, std::uint64_t step, device::Stream* behind);
  bool released() const;
  Result<device::Stream*> adopted(CudaStream stream);

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<device::Reducer> reducer_;
  const std::function<void()> wake_;
  device::Memory memory_;                                          // pinned: Flags
  std::map<CudaStream, std::unique_ptr<device::Stream>> streams_;  // the trainer's; its threads'
  std::vector<std::uint64_t> handed_over_;                         // by bucket, the last step; likewise
  std::uint64_t last_step_ = 0;                                    // likewise
  mutable std::mutex mutex_;  // guards what follows; no call of the driver is made under it
  std::vector<Reached> waiting_;
  std::vector<std::uint64_t> held_;  // by bucket: the step whose flag is outstanding; 0: none
  bool released_ = false;
};

}  // namespace rejoin
