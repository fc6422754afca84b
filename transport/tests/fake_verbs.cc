// An RDMA device in software, inside one process: libibverbs' functions as far as the verbs backend calls them, in the
// place of the library that it would load, in the program that links this. It has the rules of reliable-connected queue
// pairs: order within one, none between two; remote keys and ranges; an error resets nothing and ends everything behind
// it; receivers without buffers make senders wait. And the habits of hardware's libraries: what a queue pair has
// completed is dropped when it is reset or destroyed, and its number is given again next. So the backend meets the
// sanitizers, and its own cost can be measured without a device. Two devices, fake0 and fake1, with the GIDs of
// 127.0.0.1 and 127.0.0.2. One thread.
//
// Here: the library's functions, and what tests do to the devices. fake_verbs_datapath.cc: requests and completions.
#include "transport/tests/fake_verbs.h"

#include <fcntl.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/ibverbs/mlx5_library.h"
#include "transport/ibverbs/verbs_library.h"
#include "transport/tests/fake_verbs_state.h"

// The header's macros of these names stand in the way of their definitions.
#undef ibv_query_port
#undef ibv_reg_mr

using namespace rejoin::transport::fake;

namespace {

// Its receives take their buffers along: the queue that they came from does not get them back.
void drop_completions(const FakeQp& qp) {
  for (auto* queue : {qp.pair.send_cq, qp.pair.recv_cq})
    std::erase_if(fake<FakeCq>(queue)->completions,
                  [&](const ibv_wc& completion) { return completion.qp_num == qp.pair.qp_num; });
}

bool make_pipe(int& read_end, int& write_end) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return false;
  read_end = ends[0];
  write_end = ends[1];
  return true;
}

}  // namespace

void fake_verbs_watch(FakeVerbsTransfer new_watcher) { watcher = std::move(new_watcher); }

void fake_verbs_gids(const char* device, std::vector<FakeVerbsGid> gids) {
  for (auto& one : devices)
    if (std::strcmp(one.name, device) == 0) given_gids[&one] = gids;
}
void fake_verbs_port(const char* device, bool up, int port) {
  for (auto& one : devices) {
    if (std::strcmp(one.name, device) != 0) continue;
    if (up) down.erase(&one);
    else if (port == 1) down.insert(&one);
    for (auto* context : contexts) {
      if (context->context.device != &one) continue;
      ibv_async_event event{};
      event.event_type = up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR;
      event.element.port_num = port;
      context->events.push_back(event);
      ring(context->pipe_write);
    }
  }
}

void fake_verbs_break_queues(const char* device) {
  for (auto* queue : queues) {
    if (std::strcmp(queue->queue.context->device->name, device) != 0) continue;
    queue->broken = true;
    ibv_async_event event{};
    event.event_type = IBV_EVENT_CQ_ERR;
    event.element.cq = &queue->queue;
    auto* context = fake<FakeContext>(queue->queue.context);
    context->events.push_back(event);
    ring(context->pipe_write);
  }
}

void fake_verbs_blind(const char* device, const void* memory, std::uint64_t bytes) {
  for (auto& one : devices)
    if (std::strcmp(one.name, device) == 0) blind[&one] = {reinterpret_cast<std::uint64_t>(memory), bytes};
}

void fake_verbs_plug(const char* device, bool in) {
  for (auto& one : devices) {
    if (std::strcmp(one.name, device) != 0) continue;
    fake_verbs_port(device, in);
    if (in) unplugged.erase(&one);
    else unplugged.insert(&one);
    for (auto* context : contexts) {
      if (context->context.device != &one || in) continue;
      ibv_async_event event{};
      event.event_type = IBV_EVENT_DEVICE_FATAL;
      context->events.push_back(event);
      ring(context->pipe_write);
    }
  }
}

void fake_verbs_out_of_order(const char* device, bool can) {
  for (auto& one : devices) {
    if (std::strcmp(one.name, device) != 0) continue;
    if (can) in_order_only.erase(&one);
    else in_order_only.insert(&one);
  }
}

extern "C" {

bool mlx5dv_is_supported(ibv_device*) { return true; }
int mlx5dv_query_device(ibv_context* context, mlx5dv_context* attributes) {
  attributes->ooo_recv_wrs_caps.max_rc = in_order_only.contains(context->device) ? 0 : 256;
  return 0;
}
ibv_qp* mlx5dv_create_qp(ibv_context* context, ibv_qp_init_attr_ex* attributes, mlx5dv_qp_init_attr* more) {
  ibv_qp_init_attr plain{};
  plain.send_cq = attributes->send_cq;
  plain.recv_cq = attributes->recv_cq;
  plain.cap = attributes->cap;
  const bool unordered = (more->create_flags & MLX5DV_QP_CREATE_OOO_DP) != 0;
  if (unordered && in_order_only.contains(context->device)) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  ibv_qp* made = ibv_create_qp(attributes->pd, &plain);
  fake<FakeQp>(made)->ordered = !unordered;
  return made;
}

int ibv_fork_init() { return 0; }

ibv_device** ibv_get_device_list(int* count) {
  *count = static_cast<int>(devices.size());
  return new ibv_device* [3] { &devices[0], &devices[1], nullptr };
}
void ibv_free_device_list(ibv_device** list) { delete[] list; }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }
__be64 ibv_get_device_guid(ibv_device* device) { return device == &devices[0] ? 1 : 2; }

ibv_context* ibv_open_device(ibv_device* device) {
  if (unplugged.contains(device)) {
    errno = ENODEV;
    return nullptr;
  }
  auto* made = new FakeContext();
  made->context.device = device;
  made->context.ops.poll_cq = poll_cq;
  made->context.ops.req_notify_cq = req_notify_cq;
  made->context.ops.post_srq_recv = post_srq_recv;
  made->context.ops.post_send = post_send;
  if (!make_pipe(made->context.async_fd, made->pipe_write)) {
    delete made;
    return nullptr;
  }
  contexts.insert(made);
  return &made->context;
}
int ibv_close_device(ibv_context* context) {
  auto* made = fake<FakeContext>(context);
  contexts.erase(made);
  ::close(context->async_fd);
  ::close(made->pipe_write);
  delete made;
  return 0;
}

int ibv_query_device(ibv_context*, ibv_device_attr* limits) {
  *limits = {};
  limits->phys_port_cnt = 1;
  limits->max_cqe = 65536;
  limits->max_qp_rd_atom = limits->max_qp_init_rd_atom = 16;
  return 0;
}
int ibv_query_port(ibv_context* context, std::uint8_t port, _compat_ibv_port_attr* compat) {
  if (port != 1) return EINVAL;
  auto* attributes = reinterpret_cast<ibv_port_attr*>(compat);
  attributes->state = down.contains(context->device) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attributes->active_mtu = IBV_MTU_4096;
  attributes->gid_tbl_len = static_cast<int>(1 + std::max<std::size_t>(1, given_gids[context->device].size()));
  attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}
int _ibv_query_gid_ex(ibv_context* context, std::uint32_t, std::uint32_t index, ibv_gid_entry* entry, std::uint32_t,
                      std::size_t) {
  const FakeVerbsGid first{
      0, 0, 0,    0,    0,   0, 0, 0,
      0, 0, 0xff, 0xff, 127, 0, 0, static_cast<unsigned char>(context->device == &devices[0] ? 1 : 2)};
  const auto& given = given_gids[context->device];
  if (index > std::max<std::size_t>(1, given.size())) return ENODATA;
  *entry = {};
  entry->gid_index = index;
  entry->gid_type = index >= 1 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1;
  const auto& gid = index >= 1 && !given.empty() ? given[index - 1] : first;
  std::copy(gid.begin(), gid.end(), entry->gid.raw);
  return 0;
}
const char* ibv_port_state_str(ibv_port_state state) { return state == IBV_PORT_ACTIVE ? "active" : "down"; }
const char* ibv_wc_status_str(ibv_wc_status status) {
  if (status == IBV_WC_LOC_PROT_ERR) return "local protection error";
  if (status == IBV_WC_REM_OP_ERR) return "remote operation error";
  return status == IBV_WC_REM_ACCESS_ERR ? "remote access error" : "error";
}
const char* ibv_event_type_str(ibv_event_type type) { return type == IBV_EVENT_PORT_ERR ? "port error" : "event"; }

ibv_pd* ibv_alloc_pd(ibv_context* context) { return new ibv_pd{.context = context, .handle = 0}; }
int ibv_dealloc_pd(ibv_pd* domain) {
  delete domain;
  return 0;
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* address, std::size_t length, std::uint64_t, unsigned int access) {
  auto* made = new FakeMr();
  made->region = {.context = domain->context,
                  .pd = domain,
                  .addr = address,
                  .length = length,
                  .handle = 0,
                  .lkey = next_key,
                  .rkey = next_key};
  made->remote_write = (access & IBV_ACCESS_REMOTE_WRITE) != 0;
  made->remote_read = (access & IBV_ACCESS_REMOTE_READ) != 0;
  regions[next_key++] = made;
  return &made->region;
}
ibv_mr* ibv_reg_mr(ibv_pd* domain, void* address, std::size_t length, int access) {
  return ibv_reg_mr_iova2(domain, address, length, 0, static_cast<unsigned int>(access));
}
ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t length, std::uint64_t address, int fd,
                          int access) {
  void* mapped = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return nullptr;
  ibv_mr* made = ibv_reg_mr(domain, reinterpret_cast<void*>(address), length, access);
  fake<FakeMr>(made)->mapped = static_cast<std::byte*>(mapped);
  return made;
}
int ibv_dereg_mr(ibv_mr* region) {
  if (fake<FakeMr>(region)->mapped != nullptr) ::munmap(fake<FakeMr>(region)->mapped, region->length);
  regions.erase(region->rkey);
  delete fake<FakeMr>(region);
  return 0;
}

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* made = new FakeChannel();
  made->channel.context = context;
  if (make_pipe(made->channel.fd, made->pipe_write)) return &made->channel;
  delete made;
  return nullptr;
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  ::close(channel->fd);
  ::close(fake<FakeChannel>(channel)->pipe_write);
  delete fake<FakeChannel>(channel);
  return 0;
}
ibv_cq* ibv_create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  auto* made = new FakeCq();
  made->queue.context = context;
  made->queue.cqe = entries;
  made->channel = fake<FakeChannel>(channel);
  queues.insert(made);
  return &made->queue;
}
int ibv_resize_cq(ibv_cq* queue, int entries) {
  queue->cqe = entries;
  return 0;
}
int ibv_destroy_cq(ibv_cq* queue) {
  queues.erase(fake<FakeCq>(queue));
  delete fake<FakeCq>(queue);
  return 0;
}
int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** queue, void** context) {
  char byte = 0;
  auto* made = fake<FakeChannel>(channel);
  if (::read(channel->fd, &byte, 1) != 1) return -1;
  *queue = made->ready.front();
  *context = nullptr;
  made->ready.pop_front();
  return 0;
}
void ibv_ack_cq_events(ibv_cq*, unsigned int) {}

ibv_srq* ibv_create_srq(ibv_pd* domain, ibv_srq_init_attr*) {
  auto* made = new FakeSrq();
  made->queue.context = domain->context;
  return &made->queue;
}
int ibv_destroy_srq(ibv_srq* queue) {
  delete fake<FakeSrq>(queue);
  return 0;
}

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  auto* made = new FakeQp();
  made->pair.context = domain->context;
  made->pair.send_cq = attributes->send_cq;
  made->pair.recv_cq = attributes->recv_cq;
  made->pair.srq = attributes->srq;
  if (free_numbers.empty()) free_numbers.push_back(next_number++);
  made->pair.qp_num = free_numbers.back();
  free_numbers.pop_back();
  made->pair.state = IBV_QPS_RESET;
  made->depth = attributes->cap.max_send_wr;
  pairs[made->pair.qp_num] = made;
  return &made->pair;
}
int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
  if ((mask & IBV_QP_STATE) == 0) return EINVAL;
  auto& qp = *fake<FakeQp>(pair);
  if (unplugged.contains(pair->context->device)) return EIO;
  const auto from = pair->state, to = attributes->qp_state;
  const bool allowed = to == IBV_QPS_RESET || to == IBV_QPS_ERR || (from == IBV_QPS_RESET && to == IBV_QPS_INIT) ||
                       (from == IBV_QPS_INIT && to == IBV_QPS_RTR) || (from == IBV_QPS_RTR && to == IBV_QPS_RTS);
  if (!allowed) return EINVAL;
  if (to == IBV_QPS_RTR) qp.peer = attributes->dest_qp_num, qp.expected_packet = attributes->rq_psn;
  if (to == IBV_QPS_RTS) qp.first_packet = attributes->sq_psn;
  if (to == IBV_QPS_RESET) qp.requests.clear(), drop_completions(qp);
  if (to == IBV_QPS_ERR) to_error(qp);
  pair->state = to;
  return 0;
}
int ibv_destroy_qp(ibv_qp* pair) {
  pairs.erase(pair->qp_num);
  free_numbers.push_back(pair->qp_num);
  drop_completions(*fake<FakeQp>(pair));
  std::erase_if(fake<FakeContext>(pair->context)->events, [&](const auto& event) { return event.element.qp == pair; });
  delete fake<FakeQp>(pair);
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  auto& events = fake<FakeContext>(context)->events;
  for (char byte = 0; ::read(context->async_fd, &byte, 1) == 1;) {
    if (events.empty()) continue;  // it went with its queue pair
    *event = events.front();
    events.pop_front();
    return 0;
  }
  return -1;
}
void ibv_ack_async_event(ibv_async_event*) {}
}

// In the place of the libraries.
namespace rejoin::transport::ibverbs {

const Verbs& verbs() {
  static const Verbs fake_verbs = [] {
    Verbs made;
#define REJOIN_TAKE(name) made.name = &::ibv_##name;
    REJOIN_VERBS(REJOIN_TAKE)
#undef REJOIN_TAKE
    made.query_gid_of_size = &::_ibv_query_gid_ex;
    made.query_port_of_old = &::ibv_query_port;
    return made;
  }();
  return fake_verbs;
}
Result<const Verbs*> load_verbs() { return &verbs(); }

const Mlx5& mlx5() {
  static const Mlx5 fake_mlx5{&::mlx5dv_is_supported, &::mlx5dv_query_device, &::mlx5dv_create_qp};
  return fake_mlx5;
}
Result<const Mlx5*> load_mlx5() { return &mlx5(); }

}  // namespace rejoin::transport::ibverbs
