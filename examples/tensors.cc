#include "examples/tensors.h"

#include <algorithm>

namespace rejoin::demo {

Result<std::unique_ptr<Tensors>> Tensors::make(Session& session, const std::string& name,
                                               const std::vector<TensorId>& ids) {
  std::unique_ptr<Tensors> made(new Tensors(session));
  made->ids_ = ids;
  if (auto found = made->look_up(); !found) return tl::unexpected(found.error());
  auto device = device::open_device(name);
  if (!device) return tl::unexpected(device.error());
  if ((*device)->kind() == device::MemoryKind::host) {
    for (const auto& tensor : made->session_has_) {
      made->weights_.push_back(Session::as<float>(tensor.state[0]));
      made->gradients_.push_back(Session::as<float>(tensor.gradient));
    }
    return made;
  }
  auto stream = (*device)->make_stream();
  if (!stream) return tl::unexpected(stream.error());
  made->stream_ = std::move(*stream);
  std::size_t largest = 0;
  for (auto* views : {&made->weights_, &made->gradients_})
    for (const auto& tensor : made->session_has_) {
      const std::size_t size = tensor.gradient.size();
      auto pinned = (*device)->allocate_pinned(size);
      if (!pinned) return tl::unexpected(pinned.error());
      largest = std::max(largest, size);
      views->push_back(Session::as<float>(pinned->bytes));
      made->copies_.push_back(std::move(*pinned));
    }
  auto update = (*device)->allocate_pinned(4 * largest);
  if (!update) return tl::unexpected(update.error());
  made->update_room_ = std::move(*update);
  return made;
}

Result<> Tensors::look_up() {
  for (auto id : ids_) {
    auto& found = session_has_.emplace_back();
    auto gradient = session_.gradient(id);
    if (!gradient) return tl::unexpected(gradient.error());
    found.gradient = *gradient;
    for (const auto& column : {session_.weight(id), session_.moment(id, 0), session_.moment(id, 1)}) {
      if (!column) return tl::unexpected(column.error());
      found.state.push_back(*column);
    }
  }
  return {};
}

Result<> Tensors::put_weights() {
  if (!stream_) return {};
  for (std::size_t t = 0; t < ids_.size(); ++t)
    if (auto done = copy(session_has_[t].state[0], std::as_bytes(weights_[t])); !done) return done;
  return stream_->synchronize();
}

Result<> Tensors::get_weights() {
  if (!stream_) return {};
  for (std::size_t t = 0; t < ids_.size(); ++t)
    if (auto done = copy(std::as_writable_bytes(weights_[t]), session_has_[t].state[0]); !done) return done;
  return stream_->synchronize();
}

Result<> Tensors::all_reduce(BucketId bucket, const std::vector<TensorId>& of_it) {
  if (!stream_) return session_.all_reduce(bucket);
  for (auto id : of_it)
    if (auto done = copy(session_has_[id.index].gradient, std::as_bytes(gradients_[id.index])); !done) return done;
  return session_.all_reduce(bucket, stream_->handle());
}

Result<> Tensors::read_behind_buckets() {
  if (!stream_) return {};
  float value = 0;
  auto done = copy(std::as_writable_bytes(std::span(&value, 1)), session_has_[0].gradient.first(sizeof value));
  return done ? stream_->synchronize() : done;
}

Result<> Tensors::commit(const std::function<void(const Update&, const Views&)>& apply) {
  const auto columns = [&](const Update& update) {
    Views views;
    for (auto column : session_has_[update.tensor.index].state) views.push_back(update.of(Session::as<float>(column)));
    return views;
  };
  if (!stream_) return session_.commit([&](const Update& update) { apply(update, columns(update)); });
  Result<> done;
  auto committed = session_.commit(
      [&](const Update& update) {
        if (!done) return;
        const std::size_t size = update.gradient.size();
        const auto room = [&](std::size_t i) { return update_room_.bytes.subspan(i * size, size); };
        const Views there = columns(update);
        Views here;
        done = copy(room(3), update.gradient);
        for (std::size_t i = 0; i < there.size() && done; ++i) {
          here.push_back(Session::as<float>(room(i)));
          done = copy(room(i), std::as_bytes(there[i]));
        }
        if (done) done = stream_->synchronize();
        if (!done) return;
        Update of_host = update;
        of_host.gradient = room(3);
        apply(of_host, here);
        for (std::size_t i = 0; i < there.size() && done; ++i)
          done = copy(std::as_writable_bytes(there[i]), std::as_bytes(here[i]));
        if (done) done = stream_->synchronize();  // the room is needed again
      },
      stream_->handle());
  return done ? committed : done;
}

}  // namespace rejoin::demo
