// The queue pairs of the software RDMA device at work.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/tests/fake_verbs_state.h"

namespace rejoin::transport::fake {

namespace {

void complete(ibv_cq* queue, const ibv_wc& completion) {
  auto* cq = fake<FakeCq>(queue);
  if (cq->broken) return;
  cq->completions.push_back(completion);
  if (!std::exchange(cq->armed, false) || cq->channel == nullptr) return;
  cq->channel->ready.push_back(queue);
  ring(cq->channel->pipe_write);
}

void complete(FakeQp& qp, const Request& request, ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && !request.signalled) return;
  ibv_wc completion{};
  completion.wr_id = request.wr_id;
  completion.status = status;
  completion.qp_num = qp.pair.qp_num;
  complete(qp.pair.send_cq, completion);
}

void raise(FakeQp& qp, ibv_event_type type) {
  ibv_async_event event{};
  event.event_type = type;
  event.element.qp = &qp.pair;
  auto* context = fake<FakeContext>(qp.pair.context);
  context->events.push_back(event);
  ring(context->pipe_write);
}

}  // namespace

void to_error(FakeQp& qp) {
  const bool received = qp.pair.state == IBV_QPS_RTR || qp.pair.state == IBV_QPS_RTS;
  qp.pair.state = IBV_QPS_ERR;
  if (received && qp.pair.srq != nullptr) raise(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
  for (const auto& request : std::exchange(qp.requests, {})) complete(qp, request, IBV_WC_WR_FLUSH_ERR);
}

namespace {

FakeMr* remote_region(const Request& request, bool write) {
  auto found = regions.find(request.rkey);
  if (found == regions.end()) return nullptr;
  const auto begin = found->second->address();
  const bool inside = request.remote >= begin && request.piece.length <= found->second->region.length &&
                      request.remote - begin <= found->second->region.length - request.piece.length;
  return inside && (write ? found->second->remote_write : found->second->remote_read) ? found->second : nullptr;
}

bool can_reach(const ibv_device* device, std::uint64_t address) {
  auto found = blind.find(device);
  return found == blind.end() || address < found->second.first || address - found->second.first >= found->second.second;
}

void fail_front(FakeQp& qp, FakeQp& peer, ibv_wc_status status) {
  const Request failed = qp.requests.front();
  qp.requests.pop_front();
  complete(qp, failed, status);
  to_error(qp);
  if (status != IBV_WC_LOC_PROT_ERR) to_error(peer);
  if (status == IBV_WC_REM_ACCESS_ERR) raise(peer, IBV_EVENT_QP_ACCESS_ERR);
}

bool takes_buffer(const Request& request) {
  return request.opcode == IBV_WR_SEND || request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

// Of a write with immediate data, the buffer stays as it was.
void receive(FakeQp& peer, const Request& request, const std::byte* bytes) {
  auto& buffers = fake<FakeSrq>(peer.pair.srq)->buffers;
  const auto [wr_id, place] = buffers.front();
  buffers.pop_front();
  const bool sent = request.opcode == IBV_WR_SEND;
  if (sent) std::memcpy(reinterpret_cast<void*>(place.addr), bytes, request.piece.length);
  ibv_wc completion{};
  completion.wr_id = wr_id;
  completion.opcode = sent ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM;
  completion.byte_len = request.piece.length;
  completion.qp_num = peer.pair.qp_num;
  complete(peer.pair.recv_cq, completion);
}

// The oldest request of a queue pair, if it can be done now.
void step(FakeQp& qp) {
  if (qp.pair.state != IBV_QPS_RTS || qp.requests.empty() || down.contains(qp.pair.context->device)) return;
  auto peer_at = pairs.find(qp.peer);
  if (peer_at == pairs.end()) return;  // sent again and again, to nobody
  FakeQp& peer = *peer_at->second;
  if (peer.pair.state != IBV_QPS_RTS && peer.pair.state != IBV_QPS_RTR) return;
  if (qp.ordered != peer.ordered) return;               // each discards what the other sends
  if (peer.expected_packet != qp.first_packet) return;  // of another connection: its number was given again
  if (!qp.ordered) std::swap(qp.requests.front(), qp.requests[any() % std::min<std::size_t>(qp.requests.size(), 16)]);
  const Request& front = qp.requests.front();
  const std::byte* local =
      front.is_inline ? front.inlined.data() : reinterpret_cast<const std::byte*>(front.piece.addr);
  if (front.opcode == IBV_WR_SEND && !qp.ordered) return fail_front(qp, peer, IBV_WC_REM_INV_REQ_ERR);
  if (takes_buffer(front) && fake<FakeSrq>(peer.pair.srq)->buffers.empty()) return;
  if (front.opcode != IBV_WR_SEND) {
    const bool write = front.opcode != IBV_WR_RDMA_READ;
    const FakeMr* there = remote_region(front, write);
    if (there == nullptr) return fail_front(qp, peer, IBV_WC_REM_ACCESS_ERR);
    auto here = regions.find(front.piece.lkey);
    const bool readable = here != regions.end() && can_reach(qp.pair.context->device, front.piece.addr);
    if (!front.is_inline && !readable) return fail_front(qp, peer, IBV_WC_LOC_PROT_ERR);
    if (!can_reach(peer.pair.context->device, front.remote)) return fail_front(qp, peer, IBV_WC_REM_OP_ERR);
    std::byte* far = there->at(front.remote);
    std::byte* near = here == regions.end() ? nullptr : here->second->at(front.piece.addr);
    if (watcher) watcher(qp.pair.context->device->name, front.is_inline ? nullptr : near, far, front.piece.length);
    if (write) std::memcpy(far, front.is_inline ? local : near, front.piece.length);
    else std::memcpy(near, far, front.piece.length);
  }
  if (takes_buffer(front)) receive(peer, front, local);
  const Request done = std::move(qp.requests.front());
  qp.requests.pop_front();
  complete(qp, done, IBV_WC_SUCCESS);
}

}  // namespace

int poll_cq(ibv_cq* queue, int entries, ibv_wc* out) {
  // Some requests of every queue pair, from a different one each time.
  static std::uint32_t turn = 0;
  if (!pairs.empty()) {
    auto start = pairs.begin();
    std::advance(start, static_cast<std::ptrdiff_t>(turn++ % pairs.size()));
    std::vector<FakeQp*> order;
    for (auto it = start; it != pairs.end(); ++it) order.push_back(it->second);
    for (auto it = pairs.begin(); it != start; ++it) order.push_back(it->second);
    for (auto* qp : order)
      for (int i = 0; i < 4; ++i) step(*qp);
  }
  auto& completions = fake<FakeCq>(queue)->completions;
  int count = 0;
  for (; count < entries && !completions.empty(); ++count) {
    out[count] = completions.front();
    completions.pop_front();
  }
  return count;
}

int req_notify_cq(ibv_cq* queue, int) {
  fake<FakeCq>(queue)->armed = true;
  return 0;
}

int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** refused) {
  const auto takes = std::exchange(takes_receives, std::nullopt);
  for (std::size_t taken = 0; request != nullptr; request = request->next, ++taken) {
    if (taken == takes) {
      *refused = request;
      return ENOMEM;
    }
    fake<FakeSrq>(queue)->buffers.emplace_back(request->wr_id, *request->sg_list);
  }
  return 0;
}

int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** refused) {
  auto& qp = *fake<FakeQp>(pair);
  for (; request != nullptr; request = request->next) {
    if (qp.requests.size() >= qp.depth || pair->state == IBV_QPS_RESET || pair->state == IBV_QPS_INIT) {
      *refused = request;
      return ENOMEM;
    }
    Request taken{.wr_id = request->wr_id,
                  .opcode = request->opcode,
                  .signalled = (request->send_flags & IBV_SEND_SIGNALED) != 0,
                  .piece = *request->sg_list,
                  .remote = request->wr.rdma.remote_addr,
                  .rkey = request->wr.rdma.rkey};
    if ((request->send_flags & IBV_SEND_INLINE) != 0) {
      const auto* bytes = reinterpret_cast<const std::byte*>(request->sg_list->addr);
      taken.inlined.assign(bytes, bytes + request->sg_list->length);
      taken.is_inline = true;
    }
    if (pair->state == IBV_QPS_ERR) complete(qp, taken, IBV_WC_WR_FLUSH_ERR);
    else qp.requests.push_back(std::move(taken));
  }
  return 0;
}

}  // namespace rejoin::transport::fake
