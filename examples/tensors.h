// The demo's tensors as its CPU sees them. Where the session has them in a GPU's memory, the demo, whose model is
// computed by the CPU, works on copies: what matters to it is where state and gradients lie while they are reduced,
// served and fetched.
#pragma once

#include "device/device.h"
#include "examples/model.h"
#include "rejoin/session.h"

namespace rejoin::demo {

class Tensors {
 public:
  // After the session's allocate().
  static Result<std::unique_ptr<Tensors>> make(Session& session, const std::string& device,
                                               const std::vector<TensorId>& ids);

  // Of the host's memory: read and written by the model.
  const Views& weights() const { return weights_; }
  const Views& gradients() const { return gradients_; }

  Result<> put_weights();                                                    // the initial ones, to where they lie
  Result<> get_weights();                                                    // … as they are now
  Result<> all_reduce(BucketId bucket, const std::vector<TensorId>& of_it);  // their gradients are ready
  // As a framework reads a loss (.item()): four bytes to pageable memory, behind all that is queued, buckets included.
  Result<> read_behind_buckets();
  Result<> commit(const std::function<void(const Update&, const Views&)>& apply);  // weight, moments: of the update

 private:
  explicit Tensors(Session& session) : session_(session) {}
  Result<> look_up();
  Result<> copy(std::span<std::byte> to, BytesView from) { return stream_->copy(to.data(), from.data(), from.size()); }

  Session& session_;
  std::vector<TensorId> ids_;
  struct Columns {
    std::span<std::byte> gradient;
    std::vector<std::span<std::byte>> state;  // weight, moments
  };
  std::vector<Columns> session_has_;  // by tensor
  Views weights_, gradients_;
  // Of a GPU.
  std::unique_ptr<device::Stream> stream_;
  std::vector<device::Memory> copies_;  // pinned: weights, then gradients
  device::Memory update_room_;          // gradient, weight and moments of one update
};

}  // namespace rejoin::demo
