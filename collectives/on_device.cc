// Operations of a GPU's memory: they begin when their callers' streams have come to them, and what the CPU would add
// and copy is given to a reducer.
#include <thread>

#include "collectives/internal.h"

namespace rejoin::collectives {

void Group::begin_what_is_ready() {
  if (not_ready_ == 0) return;
  std::vector<Key> ready;
  for (const auto& [key, active] : active_)
    if (!active->begun && active->operation.ready()) ready.push_back(key);
  for (const auto& key : ready)  // one may have ended another
    if (const auto found = active_.find(key); found != active_.end()) ++steps_, begin(*found->second);
}

void Group::give_work(Active& active, std::uint32_t number) {
  const auto& task = active.operation.plan.tasks[number];
  const auto& signature = active.operation.signature;
  const auto* first = bytes_at(active, task.first, task.length).data();
  auto* const at = bytes_at(active, task.at, task.length).data();
  const bool adds = task.kind == Task::Kind::combine;
  if (task.length == 0 || (!adds && at == first)) return finished(active, number);
  const std::uint32_t divisor = signature.combine == Combine::mean && task.last ? size() : 0;
  const auto given = adds ? reducer_->add(signature.type, at, first, bytes_at(active, task.second, task.length).data(),
                                          task.length / size_of(signature.type), divisor)
                          : reducer_->copy(at, first, task.length);
  if (!given) return fail_all(given.error());
  works_.push_back({*given, &active, number});
}

void Group::finish_works() {
  if (works_.empty()) return;
  const auto done = reducer_->done();
  if (!done) {  // nothing on the device works any more
    fail_all(done.error());
    works_.clear();
    return;
  }
  while (!works_.empty() && works_.front().number <= *done) {
    const auto work = works_.front();
    works_.pop_front();
    ++steps_;
    if (work.active != nullptr) finished(*work.active, work.task);
  }
}

// For those of operations that have failed, before their memory is given back: they are few, and the kernel is there.
void Group::wait_for_works() {
  while (!works_.empty()) {
    finish_works();
    if (!works_.empty()) std::this_thread::yield();
  }
}

// Without a call of the driver: by the dma-buf that the caller has made, or as the engine can.
Result<transport::RegionId> Group::register_on_device(std::span<std::byte> memory,
                                                      const std::optional<device::Device::Exported>& exported,
                                                      transport::Access access) {
  if (exported) {
    auto registered = engine_.register_dma_buf({exported->fd.get(), exported->offset, memory}, access);
    if (registered || registered.error().code != ErrorCode::unreachable) return registered;
  }
  return engine_.register_region(memory, transport::MemoryKind::cuda, access);
}

void Group::give_scratch(DeviceScratch given) {
  Scratch scratch{.mapping = {}, .on_device = std::move(given), .region = {}};
  if (auto region = register_scratch(scratch)) {
    scratch.region = *region;
    scratch_.push_back(std::move(scratch));
  } else fail_all(region.error());
}

}  // namespace rejoin::collectives
