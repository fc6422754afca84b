// A trainer's tensors: the state (weights and moments, shared with the daemon), its gradients and their buckets, and
// what an update does to them. Without threads or sockets; the session and the simulator's trainers hold one.
#pragma once

#include <set>

#include "catchup/gradient_log.h"
#include "control.pb.h"
#include "ftar/communicator.h"
#include "local/owner.h"
#include "rejoin/session.h"

namespace rejoin {

class TrainingState {
 public:
  explicit TrainingState(std::uint64_t gradient_log_budget,
                         std::shared_ptr<device::Device> device = device::make_host())
      : gradient_log_budget_(gradient_log_budget), device_(std::move(device)) {}

  // As Session's functions of these names.
  Result<TensorId> add(const TensorSpec& tensor, const std::vector<std::span<std::byte>>& own = {});
  Result<BucketId> bucket(const std::vector<TensorId>& tensors, std::span<std::byte> own = {});
  Result<> allocate();
  Result<> keep_exact(BucketId bucket);
  Result<> set_fingerprint(std::string text);
  bool allocated() const { return owner_ != nullptr; }
  // Checks that column() and gradient() may be called for this tensor; an error names the session's call `what`.
  Result<> check_tensor(TensorId tensor, const char* what) const;
  Result<> check_moment(TensorId tensor, std::uint32_t index) const;
  std::span<std::byte> column(TensorId tensor, std::uint32_t index);  // 0: the weight; then the moments
  std::span<std::byte> gradient(TensorId tensor);
  std::span<const std::byte> reduced(TensorId tensor) const;
  // What fills the state may be queued on any of the trainer's streams: before a digest that no update comes before.
  Result<> wait_for_device() const { return owner_ ? owner_->device()->synchronize() : Result<>(); }
  Result<std::uint64_t> digest() const;        // of the state
  std::string name_of(BucketId bucket) const;  // with its tensors' names, for people
  std::string names_of_all_but(const std::vector<bool>& buckets) const;

  // ---- after allocate()
  local::Owner& owner() { return *owner_; }
  const std::vector<ftar::BucketSpec>& buckets() const { return specs_; }
  std::uint64_t plan_hash() const;
  proto::Declaration declaration() const;  // the same in full, as far as it fits a message
  // The gradients that this object has allocated itself, not those in the trainer's memory, as one range: the input of
  // the all-reduces.
  BytesView gradients() const { return input_.bytes; }

  // The state is initialised, as of step `version`. Errors: of the device.
  Result<> start(std::uint64_t version);
  // Begins the update of a committed step, and returns what is to be applied, in this order; end_update() says that it
  // has been.
  // Errors: of the device.
  Result<std::vector<catchup::Update>> begin_update(Step step, bool contributed, std::uint32_t contributors);
  void end_update(Step step, bool contributed);
  std::uint64_t gradient_log_bytes() const { return gradient_log_->bytes(); }
  // A joiner's: all of it is there, verified, and at this version now.
  bool complete_at(Step version) const;

 private:
  static constexpr BucketId kNone = ~BucketId{0};
  std::uint64_t gradient_bytes(std::size_t t) const { return tensors_[t].gradient_bytes(); }

  Result<> check_new(const local::Tensor& tensor, const local::Owner::Own& own) const;
  Result<std::uint64_t> check_bucket(BucketId id, const std::vector<TensorId>& tensors) const;  // its bytes
  Result<device::Memory> allocate_gradients(std::size_t size) const;

  const std::uint64_t gradient_log_budget_;
  const std::shared_ptr<device::Device> device_;
  std::string fingerprint_;
  std::vector<local::Tensor> tensors_;
  std::vector<local::Owner::Own> own_state_;  // by tensor: in the trainer's memory
  std::set<std::string> names_;
  std::vector<BucketId> bucket_of_;
  std::vector<std::vector<TensorId>> buckets_;
  std::vector<bool> exact_;                     // by bucket: it never travels coded
  std::vector<std::span<std::byte>> own_;       // by bucket: gradients in the trainer's memory
  std::vector<std::uint64_t> gradient_offset_;  // in output_
  std::vector<std::span<std::byte>> gradient_;
  std::vector<ftar::BucketSpec> specs_;
  device::Memory input_, output_;
  std::unique_ptr<device::Access> access_;
  std::unique_ptr<local::Owner> owner_;
  std::unique_ptr<catchup::GradientLog> gradient_log_;
};

}  // namespace rejoin
