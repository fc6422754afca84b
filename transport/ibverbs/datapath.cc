// Work going out, completions coming in.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/fail.h"
#include "base/log.h"
#include "transport/ibverbs/engine.h"

namespace rejoin::transport::ibverbs {

namespace {

constexpr std::size_t kRoom = SendSlots::kBytes - sizeof(wire::Header);
constexpr std::uint64_t kLargestRequest = 1 * GiB;  // one RDMA write or read
constexpr std::size_t kMaxRemembered = 4096;        // of the peer's regions
constexpr int kCompletionsPerPoll = 64;
constexpr std::uint64_t kLong = 4 * KiB;  // more than a packet: what order can hold up
constexpr std::size_t kFewPosted = 4;     // requests: a doorbell for each more would cost more than it gains

}  // namespace

// ---- receiving

Result<> IbverbsEngine::fill_receives() {
  while (!unposted_.empty()) {
    std::array<ibv_recv_wr, 32> requests;
    std::array<ibv_sge, 32> sges;
    const std::size_t count = std::min(requests.size(), unposted_.size());
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t buffer = unposted_[unposted_.size() - 1 - i];
      sges[i] = {.addr = reinterpret_cast<std::uint64_t>(receive_memory_.data() + buffer * SendSlots::kBytes),
                 .length = static_cast<std::uint32_t>(SendSlots::kBytes),
                 .lkey = receive_region_->lkey};
      requests[i] = {
          .wr_id = buffer, .next = i + 1 < count ? &requests[i + 1] : nullptr, .sg_list = &sges[i], .num_sge = 1};
    }
    ibv_recv_wr* refused = nullptr;
    const int error = ibv_post_srq_recv(receives_.get(), requests.data(), &refused);
    // Those before it are the device's: given twice, one would take two messages.
    const auto taken = error == 0           ? count
                       : refused != nullptr ? static_cast<std::size_t>(refused - requests.data())
                                            : 0;
    unposted_.resize(unposted_.size() - taken);
    if (error != 0) return fail(ErrorCode::io, "rail {}: posting receive buffers: {}", name_, std::strerror(error));
  }
  return {};
}

void IbverbsEngine::on_received(const ibv_wc& completion) {
  const auto buffer = static_cast<std::uint32_t>(completion.wr_id);
  unposted_.push_back(buffer);
  auto owner = by_number_.find(completion.qp_num);
  if (owner == by_number_.end() || completion.status != IBV_WC_SUCCESS) return;
  const auto [endpoint, index] = owner->second;
  if (endpoint->stage == Stage::failed) return;
  // A write with immediate data takes a buffer, too, and leaves it as it was; its length is that of what it wrote.
  if (completion.opcode != IBV_WC_RECV || completion.byte_len > SendSlots::kBytes)
    return fail_endpoint(*endpoint, ErrorCode::corrupt, "it sent something other than a message");
  opened(*endpoint);
  on_send(*endpoint, *endpoint->queue_pairs[index],
          BytesView(receive_memory_).subspan(buffer * SendSlots::kBytes, completion.byte_len));
}

void IbverbsEngine::on_send(Endpoint& endpoint, QueuePair& queue_pair, BytesView bytes) {
  wire::Header header;
  if (!take(bytes, header)) return fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a message without a header");
  if (header.number < queue_pair.received) return;  // again, after the queue pair was rebuilt
  if (header.number > queue_pair.received)
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a message out of order");
  ++queue_pair.received;
  switch (header.kind) {
    case wire::Kind::message:
      if (!endpoint.parts.add(bytes, header.extra != 0, endpoint.id, events_))
        fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a message over the limit");
      return;
    case wire::Kind::written:
      return events_.emit({.kind = EventKind::written, .endpoint = endpoint.id, .value = header.a});
    case wire::Kind::ask: return answer(endpoint, header.a);
    case wire::Kind::answer: return on_answer(endpoint, header, bytes);
    case wire::Kind::refused: return regions_.count(static_cast<Regions::Refusal>(header.a));
    case wire::Kind::withdraw:
      if (auto known = endpoint.memory.find(header.a); known != endpoint.memory.end() && known->second.known)
        endpoint.memory.erase(known);
      return;
    case wire::Kind::nothing: return;
  }
  fail_endpoint(endpoint, ErrorCode::corrupt, "it sent a message of unknown kind");
}

// ---- the peers' regions

void IbverbsEngine::answer(Endpoint& endpoint, std::uint64_t key) {
  wire::Header header{.kind = wire::Kind::answer, .a = key};
  Access access = Access::local;
  if (const Region* region = regions_.by_key(key)) {
    access = region->access;
    header.b = reinterpret_cast<std::uint64_t>(region->memory.data());
    header.c = region->memory.size();
    header.extra = registered_.at(region->id.value).region->rkey;
    known_to_[region->id.value].insert(endpoint.id);
  } else {
    regions_.count(Regions::Refusal::bad_key);
  }
  send_control(endpoint, header, bytes_of(access));
  check_unsent(endpoint);
}

void IbverbsEngine::on_answer(Endpoint& endpoint, const wire::Header& header, BytesView rest) {
  auto found = endpoint.memory.find(header.a);
  Access access = Access::local;
  if (found == endpoint.memory.end() || found->second.known || !take(rest, access))
    return fail_endpoint(endpoint, ErrorCode::corrupt, "it answered what was not asked");
  const auto waiting = std::exchange(found->second.waiting, {});
  if (header.c == 0) {
    endpoint.memory.erase(found);
    for (auto operation : waiting) finish(endpoint, operation, refusal_error(Regions::Refusal::bad_key));
    return;
  }
  RemoteMemory& memory = found->second;
  memory.known = true;
  memory.address = header.b;
  memory.length = header.c;
  memory.rkey = header.extra;
  memory.access = access;
  for (auto number : waiting) {
    Operation* operation = endpoint.operations.find(number);
    REJOIN_CHECK(operation != nullptr, "operation {:x} is not known", number);
    submit(endpoint, number, *operation, memory);
  }
  touch(endpoint);
}

// ---- posting

Result<> IbverbsEngine::send(EndpointId id, BytesView message) {
  auto endpoint = open_endpoint(id);
  if (!endpoint) return tl::unexpected(endpoint.error());
  if (auto checked = check_message(message); !checked) return checked;
  for (; message.size() > kRoom; message = message.subspan(kRoom))
    send_control(**endpoint, {.kind = wire::Kind::message, .extra = 1}, message.first(kRoom));
  send_control(**endpoint, {.kind = wire::Kind::message}, message);
  post(**endpoint);
  check_unsent(**endpoint);
  return {};
}

void IbverbsEngine::check_unsent(Endpoint& endpoint) {
  if (endpoint.stage == Stage::failed || !endpoint.queue_pairs.front()->unsent().over()) return;
  fail_endpoint(endpoint, ErrorCode::exhausted, Unsent::why());
}

void IbverbsEngine::send_control(Endpoint& endpoint, const wire::Header& header, BytesView rest) {
  endpoint.queue_pairs.front()->add_send(header, rest);
  touch(endpoint);
}

Result<> IbverbsEngine::write(EndpointId id, std::span<const Write> writes) {
  auto found = find_for_posting(endpoints_, regions_, id, writes);
  if (!found) return tl::unexpected(found.error());
  for (const auto& write : writes) {
    const auto [number, operation] = (*found)->operations.add();
    operation->context = write.context;
    operation->local = write.local;
    operation->key = write.remote.region.key;
    operation->offset = write.remote.offset;
    operation->length = write.length;
    operation->notify = write.notify;
    start(**found, number, *operation);
  }
  post(**found);
  return {};
}

Result<> IbverbsEngine::read(EndpointId id, std::span<const Read> reads) {
  auto found = find_for_posting(endpoints_, regions_, id, reads);
  if (!found) return tl::unexpected(found.error());
  for (const auto& read : reads) {
    const auto [number, operation] = (*found)->operations.add();
    operation->context = read.context;
    operation->is_read = true;
    operation->local = read.local;
    operation->key = read.remote.region.key;
    operation->offset = read.remote.offset;
    operation->length = read.length;
    start(**found, number, *operation);
  }
  post(**found);
  return {};
}

void IbverbsEngine::start(Endpoint& endpoint, std::uint64_t number, Operation& operation) {
  if (auto there = endpoint.memory.find(operation.key); there != endpoint.memory.end() && there->second.known)
    return submit(endpoint, number, operation, there->second);
  if (endpoint.memory.size() > kMaxRemembered)
    std::erase_if(endpoint.memory, [](const auto& entry) { return entry.second.known; });
  auto [entry, unasked] = endpoint.memory.try_emplace(operation.key);
  if (unasked) send_control(endpoint, {.kind = wire::Kind::ask, .a = operation.key});
  entry->second.waiting.push_back(number);
}

void IbverbsEngine::submit(Endpoint& endpoint, std::uint64_t number, Operation& operation, const RemoteMemory& memory) {
  const Access needed = operation.is_read ? Access::remote_read : Access::remote_write;
  const auto refusal = refusal_of(operation.offset, operation.length, needed, memory.length, memory.access);
  if (refusal != Regions::Refusal::none) {
    send_control(endpoint, {.kind = wire::Kind::refused, .a = static_cast<std::uint64_t>(refusal)});
    return finish(endpoint, number, refusal_error(refusal));
  }
  auto registered = registered_.find(operation.local.region.value);
  if (registered == registered_.end())
    return finish(endpoint, number, Error{ErrorCode::cancelled, "the local region was deregistered"});
  QueuePair& queue_pair = carrier(endpoint, operation.length);
  const std::uint64_t local = registered->second.address + operation.local.offset;
  for (std::uint64_t at = 0; at < operation.length; at += kLargestRequest) {
    const std::uint64_t length = std::min(kLargestRequest, operation.length - at);
    Work& work = queue_pair.add(operation.is_read ? Work::Kind::read : Work::Kind::write, length);
    work.address = local + at;
    work.lkey = registered->second.region->lkey;
    work.remote_address = memory.address + operation.offset + at;
    work.rkey = memory.rkey;
    work.in_host_memory = registered->second.kind == MemoryKind::host;
    work.operation = number;
    work.last = queue_pair.ordered() && at + length == operation.length && !operation.notify;
    if (!queue_pair.ordered()) ++operation.unfinished;
  }
  if (operation.unfinished > 0) return;  // on_done() goes on
  if (operation.notify) {
    Work& work = queue_pair.add_send({.kind = wire::Kind::written, .a = *operation.notify});
    work.operation = number;
    work.last = true;
  } else if (operation.length == 0) {
    finish(endpoint, number, {});
  }
}

QueuePair& IbverbsEngine::carrier(Endpoint& endpoint, std::uint64_t length) {
  auto begin = endpoint.queue_pairs.begin();
  if (!endpoint.queue_pairs.back()->ordered()) {
    if (length < kLong) return **begin;
    ++begin;
  }
  return **std::min_element(begin, endpoint.queue_pairs.end(),
                            [](const auto& a, const auto& b) { return a->bytes() < b->bytes(); });
}

// What is handed in goes out at once where the queue pair has little to do, and otherwise with the next poll(), in one
// batch.
void IbverbsEngine::post(Endpoint& endpoint) {
  bool left = false;
  for (auto& queue_pair : endpoint.queue_pairs) {
    if (queue_pair->waiting() && queue_pair->posted() < kFewPosted)
      if (auto posted = queue_pair->post(); !posted)
        return fail_endpoint(endpoint, posted.error().code, posted.error().message);
    left = left || queue_pair->waiting();
  }
  if (left) touch(endpoint);
}

void IbverbsEngine::touch(Endpoint& endpoint) {
  if (!std::exchange(endpoint.dirty, true)) dirty_.push_back(endpoint.id);
}

void IbverbsEngine::flush() {
  if (dirty_.empty() && unposted_.size() < options_.receive_buffers / 8) return;
  flushed_.clear();
  flushed_.swap(dirty_);
  for (auto id : flushed_) {
    Endpoint* endpoint = find(id);
    if (endpoint == nullptr) continue;
    endpoint->dirty = false;
    if (endpoint->stage == Stage::failed && !endpoint->announced) {
      endpoints_.erase(id.value);
      continue;
    }
    Result<> posted;
    for (auto& queue_pair : endpoint->queue_pairs)
      if (posted) posted = queue_pair->post();
    if (!posted) {
      fail_endpoint(*endpoint, posted.error().code, posted.error().message);
      continue;
    }
    for (const auto& queue_pair : endpoint->queue_pairs)
      if (queue_pair->starved()) touch(*endpoint);
  }
  if (!device_ || unposted_.size() < options_.receive_buffers / 8) return;
  if (auto filled = fill_receives(); !filled && unfilled_.may_say(clock_.now())) logger().error("{}", filled.error());
}

// ---- completions

// Into the backlog; whether there may be more.
bool IbverbsEngine::take_completions() {
  if (!device_) return false;
  std::array<ibv_wc, kCompletionsPerPoll> completions;
  const int count = ibv_poll_cq(completions_.get(), kCompletionsPerPoll, completions.data());
  for (int i = 0; i < count; ++i) backlog_.push_back(completions[static_cast<std::size_t>(i)]);
  return count == kCompletionsPerPoll;
}

void IbverbsEngine::take_all_completions() {
  for (bool more = true; more;) more = take_completions();
}

void IbverbsEngine::poll_completions() {
  take_completions();
  while (!backlog_.empty()) on_completion(backlog_.pop_front());
}

void IbverbsEngine::on_completion(const ibv_wc& completion) {
  // Of a failed one only wr_id, status and queue pair are valid; sends carry a tag, receives have none.
  const std::uint32_t tag = QueuePair::tag_of(completion.wr_id);
  if (tag == 0) return on_received(completion);
  auto owner = by_tag_.find(tag);
  if (owner == by_tag_.end()) return;
  Endpoint* endpoint = owner->second.endpoint;
  const std::size_t index = owner->second.index;
  if (endpoint->stage == Stage::failed) return;
  if (completion.status != IBV_WC_SUCCESS) return on_work_failed(*endpoint, index, completion);
  QueuePair& queue_pair = *endpoint->queue_pairs[index];
  queue_pair.on_completion(completion, [&](const Work& work) { on_done(*endpoint, work); });
  if (queue_pair.waiting()) touch(*endpoint);
}

void IbverbsEngine::on_done(Endpoint& endpoint, const Work& work) {
  if (work.last) return finish(endpoint, work.operation, {});
  Operation* operation = work.operation != 0 ? endpoint.operations.find(work.operation) : nullptr;
  // Of one on a queue pair that keeps order, the last work speaks for all.
  if (operation == nullptr || operation->unfinished == 0 || --operation->unfinished > 0) return;
  if (!operation->notify) return finish(endpoint, work.operation, {});
  Work& notification = endpoint.queue_pairs.front()->add_send({.kind = wire::Kind::written, .a = *operation->notify});
  notification.operation = work.operation;
  notification.last = true;
  touch(endpoint);
}

void IbverbsEngine::finish(Endpoint& endpoint, std::uint64_t number, const std::optional<Error>& error) {
  const Operation* operation = endpoint.operations.find(number);
  if (operation == nullptr) return;
  events_.emit({.kind = EventKind::completed, .endpoint = endpoint.id, .value = operation->context, .error = error});
  endpoint.operations.erase(number);
}

void IbverbsEngine::on_work_failed(Endpoint& endpoint, std::size_t index, const ibv_wc& completion) {
  QueuePair& queue_pair = *endpoint.queue_pairs[index];
  if (completion.status == IBV_WC_WR_FLUSH_ERR) return;  // what is behind a failure; reset() keeps it
  const auto failed = queue_pair.on_failure(completion, [&](const Work& work) { on_done(endpoint, work); });
  if (!failed) return;  // of before a reset
  const bool refused = completion.status == IBV_WC_REM_ACCESS_ERR || completion.status == IBV_WC_REM_INV_REQ_ERR;
  const bool unreachable = completion.status == IBV_WC_LOC_PROT_ERR || completion.status == IBV_WC_REM_OP_ERR;
  if (!(refused || unreachable) || failed->kind == Work::Kind::send)
    return fail_endpoint(endpoint, ErrorCode::unavailable,
                         fmt::format("rail {}: {}", name_, verbs().wc_status_str(completion.status)));
  // A region was withdrawn while this was on its way, or one of the two devices can't get at its memory.
  if (const Operation* operation = endpoint.operations.find(failed->operation)) {
    if (auto memory = endpoint.memory.find(operation->key); memory != endpoint.memory.end() && memory->second.known)
      endpoint.memory.erase(memory);
    std::optional<Error> error = refusal_error(Regions::Refusal::bad_key);
    if (regions_.find(operation->local.region) == nullptr)
      error = Error{ErrorCode::cancelled, "the local region was deregistered"};
    else if (unreachable)
      error = Error{ErrorCode::unreachable, fmt::format("rail {} can't get at the memory of a transfer: {}", name_,
                                                        verbs().wc_status_str(completion.status))};
    finish(endpoint, failed->operation, error);
  }
  begin_rebuild(endpoint, index);
  if (endpoint.stage == Stage::open) queue_pair.cancel(failed->operation);
}

// What it has received is handled before the peer is told how much that is, and what it has done is not done again.
// What has failed meanwhile is posted again, and fails again. What it has received may end the endpoint.
Result<> IbverbsEngine::reset(Endpoint& endpoint, std::size_t index) {
  const std::uint32_t number = endpoint.queue_pairs[index]->number();
  drain({&endpoint.queue_pairs[index], 1});
  std::vector<ibv_wc> ours;
  backlog_.erase_if([&](const ibv_wc& completion) {
    if (completion.qp_num != number) return false;
    if (completion.status == IBV_WC_SUCCESS || QueuePair::tag_of(completion.wr_id) == 0) ours.push_back(completion);
    return true;
  });
  for (const auto& completion : ours) on_completion(completion);
  if (endpoint.stage == Stage::failed) return {};
  return endpoint.queue_pairs[index]->reset();
}

void IbverbsEngine::begin_rebuild(Endpoint& endpoint, std::size_t index) {
  if (auto done = reset(endpoint, index); !done)
    return fail_endpoint(endpoint, done.error().code, done.error().message);
  if (endpoint.stage == Stage::failed) return;
  endpoint.rebuilding[index] = true;
  send_signal(endpoint, index, wire::Signal::rebuild);
}

}  // namespace rejoin::transport::ibverbs
