#include "transport/ibverbs/queue_pair.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <random>

#include "base/fail.h"
#include "transport/ibverbs/out_of_order.h"

namespace rejoin::transport::ibverbs {

namespace {

constexpr std::uint32_t kInlineWanted = 220;
constexpr std::uint32_t kBatch = 32;        // requests with one doorbell
constexpr std::uint64_t kSignalEvery = 16;  // requests

ibv_mtu mtu_of(std::uint32_t bytes) {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

}  // namespace

Result<> SendSlots::make(const Device& device, std::uint32_t count) {
  memory_.resize(count * kBytes);
  auto region = device.register_memory(memory_, MemoryKind::host, Access::local);
  if (!region) return tl::unexpected(region.error());
  region_ = std::move(*region);
  for (std::uint32_t i = 0; i < count; ++i) free_.push_back(i);
  return {};
}

void SendSlots::reset() {
  region_.reset();
  memory_.clear();
  free_.clear();
}

std::optional<std::uint32_t> SendSlots::take() {
  if (free_.empty()) return std::nullopt;
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

Result<std::unique_ptr<QueuePair>> QueuePair::make(const Shared& shared, std::uint32_t tag, Order order) {
  std::unique_ptr<QueuePair> made(new QueuePair(shared, tag, order));
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = shared.completions;
  attributes.srq = shared.receives;
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = shared.options.queue_depth;
  attributes.cap.max_send_sge = 1;
  const auto create = [&](std::uint32_t inlined) {
    attributes.cap.max_inline_data = inlined;
    made->handle_ = QueuePairHandle(order == Order::kept ? verbs().create_qp(shared.device.domain(), &attributes)
                                                         : create_out_of_order(shared.device.domain(), attributes));
    return made->handle_ != nullptr;
  };
  // Not every device inlines; and what goes without order is long.
  if ((order == Order::none || !create(kInlineWanted)) && !create(0))
    return fail(ErrorCode::exhausted, "rail {}: can't make a queue pair of depth {}: {}", shared.device.name(),
                shared.options.queue_depth, std::strerror(errno));
  made->inline_bytes_ = attributes.cap.max_inline_data;
  if (auto initialised = made->initialise(); !initialised) return tl::unexpected(initialised.error());
  return made;
}

QueuePair::~QueuePair() {
  for (std::size_t i = 0; i < works_.size(); ++i) release(works_[i]);
}

Result<> QueuePair::initialise() {
  first_packet_ = std::random_device{}() & 0xffffff;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = shared_.device.port_number();
  attributes.pkey_index = path_ ? path_->partition : std::uint16_t{0};
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  const int error = verbs().modify_qp(handle_.get(), &attributes,
                                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0)
    return fail(ErrorCode::io, "rail {}: queue pair to INIT: {}", shared_.device.name(), std::strerror(error));
  return {};
}

Path QueuePair::path_to(const Peer& peer) const {
  const Options& options = shared_.options;
  const Device& device = shared_.device;
  Path path;
  path.receive_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  ibv_qp_attr& receive = path.receive;
  receive.qp_state = IBV_QPS_RTR;
  const std::uint32_t active = 128u << device.port().active_mtu;
  receive.path_mtu = mtu_of(std::min({active, options.mtu == 0 ? active : options.mtu, peer.mtu}));
  receive.dest_qp_num = peer.number;
  receive.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min(16, device.limits().max_qp_rd_atom));
  receive.ah_attr.sl = options.service_level;
  receive.ah_attr.port_num = device.port_number();
  receive.ah_attr.dlid = peer.lid;
  if (device.ethernet() || peer.lid == 0) {
    receive.ah_attr.is_global = 1;
    receive.ah_attr.grh = {.dgid = peer.gid,
                           .flow_label = 0,
                           .sgid_index = device.gid_index(),
                           .hop_limit = 64,
                           .traffic_class = options.traffic_class};
  }
  path.send_mask =
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  path.send.qp_state = IBV_QPS_RTS;
  path.send.max_rd_atomic = static_cast<std::uint8_t>(std::min(16, device.limits().max_qp_init_rd_atom));
  return path;
}

Result<> QueuePair::set_path(const Path& path) {
  path_ = path;
  const auto initialised = initialise();
  first_packet_ = path.send.sq_psn;
  return initialised;
}

Result<> QueuePair::connect(const Peer& peer, bool may_post) {
  Path path = path_ ? *path_ : path_to(peer);
  path.receive.rq_psn = peer.first_packet;
  path.receive.min_rnr_timer = 1;  // 10 µs; a receiver without a buffer gets one with its next poll
  path.send.sq_psn = first_packet_;
  path.send.timeout = shared_.options.timeout;
  path.send.retry_cnt = shared_.options.retries;
  path.send.rnr_retry = 7;  // for ever: a peer that does not read is slow, not dead; others judge that
  if (const int error = verbs().modify_qp(handle_.get(), &path.receive, path.receive_mask); error != 0)
    return fail(ErrorCode::unavailable,
                "rail {}: no route to the peer's queue pair: {}; do both rails lie in one network?",
                shared_.device.name(), std::strerror(error));
  receiving_ = ordered();  // the others have no receive buffers
  if (const int error = verbs().modify_qp(handle_.get(), &path.send, path.send_mask); error != 0)
    return fail(ErrorCode::io, "rail {}: queue pair to RTS: {}", shared_.device.name(), std::strerror(error));
  may_post_ = may_post;
  return {};
}

Work& QueuePair::add(Work::Kind kind, std::uint64_t length) {
  bytes_ += length;
  Work& work = works_.emplace_back();
  work.kind = kind;
  work.length = length;
  return work;
}

Work& QueuePair::add_send(wire::Header header, BytesView rest) {
  Work& work = add(Work::Kind::send, 0);
  work.number = header.number = next_send_++;
  work.message_bytes = static_cast<std::uint32_t>(sizeof header + rest.size());
  work.slot = shared_.slots.take();
  if (!work.slot) work.message.resize(work.message_bytes);
  unsent_.add(counted(work));
  const auto to = message_of(work);
  std::memcpy(to.data(), &header, sizeof header);
  if (!rest.empty()) std::memcpy(to.data() + sizeof header, rest.data(), rest.size());
  return work;
}

std::span<std::byte> QueuePair::message_of(Work& work) {
  return work.slot ? shared_.slots.bytes(*work.slot).first(work.message_bytes) : std::span(work.message);
}

// False where it has to wait for a slot.
bool QueuePair::prepare(Work& work, ibv_send_wr& request, ibv_sge& sge) {
  request = {};
  request.sg_list = &sge;
  request.num_sge = 1;
  if (work.kind == Work::Kind::send) {
    const bool inlined = work.message_bytes <= inline_bytes_;
    if (!inlined && !work.slot) {
      work.slot = shared_.slots.take();
      if (!work.slot) return false;
      std::memcpy(message_of(work).data(), work.message.data(), work.message_bytes);
      work.message = {};
    }
    request.opcode = IBV_WR_SEND;
    if (inlined) request.send_flags = IBV_SEND_INLINE;
    sge = {.addr = reinterpret_cast<std::uint64_t>(message_of(work).data()),
           .length = work.message_bytes,
           .lkey = inlined ? 0 : shared_.slots.lkey()};
    return true;
  }
  request.opcode = work.kind == Work::Kind::write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
  request.wr.rdma.remote_addr = work.remote_address;
  request.wr.rdma.rkey = work.rkey;
  sge = {.addr = work.address, .length = static_cast<std::uint32_t>(work.length), .lkey = work.lkey};
  if (work.kind == Work::Kind::write && work.in_host_memory && work.length <= inline_bytes_)
    request.send_flags = IBV_SEND_INLINE;
  return true;
}

Result<> QueuePair::post() {
  while (may_post_ && waiting() && posted_ < shared_.options.queue_depth) {
    std::array<ibv_send_wr, kBatch> requests;
    std::array<ibv_sge, kBatch> sges;
    const std::size_t room =
        std::min<std::size_t>({kBatch, works_.size() - posted_, shared_.options.queue_depth - posted_});
    std::size_t count = 0;
    for (; count < room; ++count) {
      if (!prepare(works_[posted_ + count], requests[count], sges[count])) break;
      requests[count].wr_id = std::uint64_t{tag_} << kNumberBits | ((next_request_ + count) & kNumberMask);
      if (++unsignalled_ >= kSignalEvery || !ordered()) {
        requests[count].send_flags |= IBV_SEND_SIGNALED;
        unsignalled_ = 0;
      }
      if (count > 0) requests[count - 1].next = &requests[count];
    }
    if (count == 0) return {};
    // The last of a batch tells of all; without it a full queue would never learn that it has room.
    requests[count - 1].send_flags |= IBV_SEND_SIGNALED;
    unsignalled_ = 0;
    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(handle_.get(), requests.data(), &refused);
    posted_ += count;
    next_request_ += count;
    if (error != 0)
      return fail(ErrorCode::io, "rail {}: posting work: {}", shared_.device.name(), std::strerror(error));
  }
  return {};
}

void QueuePair::release(Work& work) {
  if (work.slot) shared_.slots.give_back(*std::exchange(work.slot, std::nullopt));
}

// Of the work that this is about, in what is posted; beyond its end for work of before a reset.
std::uint64_t QueuePair::behind_oldest(const ibv_wc& completion) const {
  return (completion.wr_id - (next_request_ - posted_)) & kNumberMask;
}

void QueuePair::stop() {
  may_post_ = false;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  if (verbs().modify_qp(handle_.get(), &attributes, IBV_QP_STATE) != 0) receiving_ = false;  // the device is gone
}

Result<> QueuePair::reset() {
  may_post_ = receiving_ = false;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RESET;
  if (const int error = verbs().modify_qp(handle_.get(), &attributes, IBV_QP_STATE); error != 0)
    return fail(ErrorCode::io, "rail {}: queue pair to RESET: {}", shared_.device.name(), std::strerror(error));
  works_.erase_if([](const Work& work) { return work.done; });
  posted_ = 0;
  unsignalled_ = 0;
  return initialise();
}

void QueuePair::withdraw(std::uint32_t lkey) {
  for (std::size_t i = 0; i < works_.size(); ++i) {
    Work& work = works_[i];
    if (work.kind == Work::Kind::send || work.lkey != lkey) continue;
    work.lkey = 0;  // no region's: the device may give this one to another
    work.in_host_memory = false;
  }
}

void QueuePair::cancel(std::uint64_t operation) {
  works_.erase_if([&](Work& work) {
    if (work.operation != operation) return false;
    bytes_ -= work.length;
    if (work.kind != Work::Kind::send) return true;
    const auto kind = wire::Kind::nothing;
    std::memcpy(message_of(work).data() + offsetof(wire::Header, kind), &kind, sizeof kind);
    work.operation = 0;
    return false;
  });
}

}  // namespace rejoin::transport::ibverbs
