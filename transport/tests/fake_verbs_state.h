// What the parts of the software RDMA device (fake_verbs.cc) share: its objects, and which there are.
#pragma once

#include <infiniband/verbs.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "transport/tests/fake_verbs.h"

namespace rejoin::transport::fake {

struct FakeContext {
  ibv_context context{};  // first: pointers are cast
  int pipe_write = -1;
  std::deque<ibv_async_event> events;
};

struct FakeMr {
  ibv_mr region{};
  bool remote_write = false, remote_read = false;
  // By dma-buf: where its bytes are, at the address that the region has for the device.
  std::byte* mapped = nullptr;
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(region.addr); }
  std::byte* at(std::uint64_t where) const {
    return mapped != nullptr ? mapped + (where - address()) : reinterpret_cast<std::byte*>(where);
  }
};

struct FakeSrq {
  ibv_srq queue{};
  std::deque<std::pair<std::uint64_t, ibv_sge>> buffers;
};

struct FakeChannel {
  ibv_comp_channel channel{};
  int pipe_write = -1;
  std::deque<ibv_cq*> ready;
};

struct FakeCq {
  ibv_cq queue{};
  FakeChannel* channel = nullptr;
  bool armed = false, broken = false;
  std::deque<ibv_wc> completions;
};

struct Request {
  std::uint64_t wr_id = 0;
  ibv_wr_opcode opcode{};
  bool signalled = false;
  ibv_sge piece{};
  std::vector<std::byte> inlined;
  bool is_inline = false;
  std::uint64_t remote = 0;
  std::uint32_t rkey = 0;
};

struct FakeQp {
  ibv_qp pair{};
  std::size_t depth = 0;
  std::uint32_t peer = 0, first_packet = 0, expected_packet = 0;
  bool ordered = true;
  std::deque<Request> requests;
};

inline std::array<ibv_device, 2> devices = [] {
  std::array<ibv_device, 2> made{};
  std::strcpy(made[0].name, "fake0");
  std::strcpy(made[1].name, "fake1");
  return made;
}();
inline std::set<const ibv_device*> down, unplugged, in_order_only;
inline std::minstd_rand any;                                                        // the order where there is none
inline std::map<const ibv_device*, std::pair<std::uint64_t, std::uint64_t>> blind;  // address, bytes
inline std::set<FakeContext*> contexts;
inline std::set<FakeCq*> queues;
inline FakeVerbsTransfer watcher;
inline std::optional<std::size_t> takes_receives;  // so many of the next chain, and refuses the others
inline std::map<const ibv_device*, std::vector<FakeVerbsGid>> given_gids;
inline std::map<std::uint32_t, FakeQp*> pairs;
inline std::map<std::uint32_t, FakeMr*> regions;
inline std::vector<std::uint32_t> free_numbers;
inline std::uint32_t next_number = 17, next_key = 1000;

template <typename Fake, typename Real>
Fake* fake(Real* real) {
  return reinterpret_cast<Fake*>(real);
}

inline void ring(int fd) { (void)!::write(fd, "x", 1); }

// ---- the data path

void to_error(FakeQp& qp);
int poll_cq(ibv_cq* queue, int entries, ibv_wc* out);
int req_notify_cq(ibv_cq* queue, int);
int post_srq_recv(ibv_srq* queue, ibv_recv_wr* request, ibv_recv_wr** refused);
int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr** refused);

}  // namespace rejoin::transport::fake
