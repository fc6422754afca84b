// One transfer of an operation: the receiver says where, the sender writes; and the memory that this needs.
#include <algorithm>
#include <utility>

#include "base/fail.h"
#include "collectives/internal.h"

namespace rejoin::collectives {

using transport::RegionId;

namespace {

constexpr std::size_t kMostEarly = 1'000'000;  // transfers that others are ready for, and this member not

}  // namespace

// A few bytes of the host's memory go in a message; a GPU's, which the CPU can't look into, never do.
bool Group::by_message(const Active& active, std::uint64_t length) {
  return length == 0 || (length <= kMessageBytes && !active.on_device());
}

// In an all-to-all nothing waits for anything else, so that the numbers of its tasks are nobody's.
void Group::leave_out_what_peers_do_not_speak(Operation& operation) const {
  if (operation.signature.kind != Collective::all_to_all) return;
  std::erase_if(operation.plan.tasks, [&](const Task& task) {
    const bool remote = task.kind == Task::Kind::receive || task.kind == Task::Kind::send;
    return remote && task.length == 0 && peers_[task.peer].version < 2;
  });
}

// A receiver is ready: to take what this member sends in that operation.
void Group::on_ready(std::uint32_t rank, const Ready& ready) {
  const bool between_two = ready.signature.kind == Collective::receive;
  const Key key{between_two ? kSends | ready.tag : kCollective, between_two ? rank : 0, ready.ordinal};
  if (const auto found = active_.find(key); found != active_.end()) return match(*found->second, rank, ready);
  const auto counted = between_two_.find({key[0], key[1], 0});
  const auto begun = !between_two ? collectives_ : counted != between_two_.end() ? counted->second : 0;
  if (ready.ordinal < begun)
    return fail_all({ErrorCode::mismatch,
                     fmt::format("{} waits for bytes in {}, which is {} {} of this process group, and on rank {} that "
                                 "has none for it: all ranks call the same in the same order",
                                 name(rank), describe(ready.signature), between_two ? "message" : "collective",
                                 ready.ordinal + 1, rank_)});
  if (++ready_early_count_ > kMostEarly)
    return fail_all({ErrorCode::corrupt,
                     fmt::format("{} is ready for over a million transfers that this one has not begun", name(rank))});
  ready_early_[key].emplace_back(rank, ready);
}

void Group::match(Active& active, std::uint32_t rank, const Ready& ready) {
  const auto& signature = active.operation.signature;
  const bool between_two = signature.kind == Collective::send;
  if (!between_two && ready.signature != signature)
    return fail_all(
        {ErrorCode::mismatch,
         fmt::format("collective {} of this process group is {} on rank {}, and {} on {}: all ranks call "
                     "the same in the same order",
                     ready.ordinal + 1, describe(signature), rank_, describe(ready.signature), name(rank))});
  const auto sends = active.sends.find(rank);
  const auto number = sends != active.sends.end() && ready.index < sends->second.size()
                          ? std::optional(sends->second[ready.index])
                          : std::nullopt;
  if (!number)
    return fail_all({ErrorCode::mismatch,
                     fmt::format("{} waits for {} bytes in {}{}, and rank {} has none for it: all ranks call the same, "
                                 "with sizes that fit",
                                 name(rank), ready.length, between_two ? "a message" : describe(signature),
                                 between_two ? fmt::format(" with tag {}", ready.tag) : "", rank_)});
  if (active.ready[*number])
    return fail_all(
        {ErrorCode::corrupt, fmt::format("{} is ready for a transfer of {} twice", name(rank), describe(signature))});
  if (const auto length = active.operation.plan.tasks[*number].length; length != ready.length)
    return fail_all({ErrorCode::mismatch,
                     fmt::format("{} receives {} bytes in {}{}, and rank {} sends {}: all ranks call the same, "
                                 "with sizes that fit",
                                 name(rank), ready.length, between_two ? "a message" : describe(signature),
                                 between_two ? fmt::format(" with tag {}", ready.tag) : "", rank_, length)});
  if (ready.signature.memory != signature.memory)  // between two
    return fail_all(
        {ErrorCode::mismatch, fmt::format("{} is {} on rank {}, and {} on {}: both sides take memory of one kind",
                                          between_two ? "a message" : "a collective", describe(signature), rank_,
                                          describe(ready.signature), name(rank))});
  active.ready[*number] = ready;
  if (active.waits_for_ready.erase(*number) > 0) post(active, *number, ready);
}

void Group::post(Active& active, std::uint32_t number, const Ready& ready) {
  const auto& task = active.operation.plan.tasks[number];
  if (by_message(active, task.length)) {
    Bytes message = joined(Message::payload, bytes_of(ready.id));
    const auto bytes = bytes_at(active, task.at, task.length);
    message.insert(message.end(), bytes.begin(), bytes.end());
    if (send(task.peer, message)) finished(active, number);
    return;
  }
  const auto region = region_of(active, task.at.memory);
  if (!region) return fail_all(region.error());
  const auto id = ++ids_;
  const transport::Write write{.context = id,
                               .local = {*region, task.at.offset},
                               .remote = {{ready.key, ready.region_bytes}, ready.offset},
                               .length = task.length,
                               .notify = ready.id};
  writes_[id] = {&active, number};
  if (auto posted = engine_.write(peers_[task.peer].endpoint, {&write, 1}); !posted)
    fail_all(gone(task.peer, posted.error().message));
}

void Group::receive(Active& active, std::uint32_t number) {
  const auto& task = active.operation.plan.tasks[number];
  Ready ready{.ordinal = active.key[2],
              .id = ++ids_,
              .length = task.length,
              .signature = active.operation.signature,
              .tag = active.operation.tag,
              .index = active.index[number]};
  if (!by_message(active, task.length)) {
    const auto region = region_of(active, task.at.memory);
    if (!region) return fail_all(region.error());
    const auto remote = engine_.remote(*region);
    ready.key = remote.key, ready.region_bytes = remote.length, ready.offset = task.at.offset;
  }
  receives_[ready.id] = {&active, number};
  send(task.peer, joined(Message::ready, bytes_of(ready)));
}

void Group::arrived(std::uint32_t rank, std::uint64_t id, std::optional<BytesView> payload) {
  const auto found = receives_.find(id);
  const auto transfer = found != receives_.end() ? found->second : Transfer{};
  const Task* task = transfer.active != nullptr ? &transfer.active->operation.plan.tasks[transfer.task] : nullptr;
  if (task == nullptr || task->peer != rank || payload.has_value() != by_message(*transfer.active, task->length) ||
      (payload && payload->size() != task->length))
    return fail_all({ErrorCode::corrupt, fmt::format("{} has sent what was not asked for", name(rank))});
  if (payload) std::ranges::copy(*payload, bytes_at(*transfer.active, task->at, task->length).begin());
  receives_.erase(found);
  finished(*transfer.active, transfer.task);
}

Result<RegionId> Group::region_of(Active& active, std::uint32_t memory) {
  if (memory >= active.operation.memory.size()) return active.scratch->region;
  auto& region = active.regions[memory];
  if (!region) {
    // Others write what is received here, and what is only sent is nobody's.
    const bool receives = std::ranges::any_of(active.operation.plan.tasks, [&](const Task& task) {
      return task.kind == Task::Kind::receive && task.at.memory == memory;
    });
    const auto access = receives ? transport::Access::remote_write : transport::Access::local;
    const auto bytes = active.operation.memory[memory];
    auto registered = active.on_device() ? register_on_device(bytes, active.operation.exported[memory], access)
                                         : engine_.register_region(bytes, transport::MemoryKind::host, access);
    if (!registered) return registered;
    region = *registered;
  }
  return *region;
}

Result<> Group::take_scratch(Active& active) {
  const auto bytes = active.operation.plan.scratch;
  if (bytes == 0) return {};
  const auto fits = std::find_if(scratch_.begin(), scratch_.end(), [&](const Scratch& one) {
    return one.on_device.has_value() == active.on_device() && one.bytes().size() >= bytes;
  });
  if (fits != scratch_.end()) {
    active.scratch = std::move(*fits);
    scratch_.erase(fits);
    return {};
  }
  if (active.on_device())
    return fail(ErrorCode::exhausted, "{} of scratch memory on the GPU are not there: make the process group anew",
                human_bytes(bytes));
  auto mapping = Mapping::shareable(round_up(bytes, 64 * KiB));
  if (!mapping) return tl::unexpected(mapping.error());
  Scratch scratch{.mapping = std::move(*mapping), .on_device = {}, .region = {}};
  auto region = register_scratch(scratch);
  if (!region) return tl::unexpected(region.error());
  scratch.region = *region;
  active.scratch = std::move(scratch);
  return {};
}

Result<RegionId> Group::register_scratch(const Scratch& scratch) {
  constexpr auto access = transport::Access::remote_write;
  return scratch.on_device ? register_on_device(scratch.on_device->memory, scratch.on_device->exported, access)
                           : engine_.register_region(scratch.bytes(), transport::MemoryKind::host, access);
}

// Scratch memory serves the next operation, and of those that are free the largest stay. That of one that has failed
// may still be written to by its old key: it gets another. New memory would cost its first touch, in the first
// operation after a failure of all.
void Group::give_back(Active& active) {
  for (const auto& region : active.regions)
    if (region) engine_.deregister(*region);
  if (!active.scratch) return;
  if (failed_) {
    engine_.deregister(active.scratch->region);
    const auto again = register_scratch(*active.scratch);
    if (!again) return active.scratch.reset();
    active.scratch->region = *again;
  }
  scratch_.push_back(std::move(*active.scratch));
  // A GPU's, which is not this group's to free, all stays.
  std::ranges::sort(scratch_, std::greater{}, [](const Scratch& one) { return one.mapping.size(); });
  std::size_t of_host = 0;
  std::erase_if(scratch_, [&](const Scratch& one) {
    if (one.on_device || ++of_host <= kAtOnce) return false;
    engine_.deregister(one.region);
    return true;
  });
}

}  // namespace rejoin::collectives
