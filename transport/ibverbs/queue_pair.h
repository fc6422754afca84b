// One reliable-connected queue pair and what is posted on it. Work is done in the order it was handed in, unless the
// queue pair is one without order; what exceeds the queue's depth waits here. After an error the queue pair is reset,
// not resumed: what it had not done is kept and posted again, unless the peer has acknowledged it.
#pragma once

#include "transport/containers.h"
#include "transport/ibverbs/device.h"
#include "transport/ibverbs/wire.h"
#include "transport/unsent.h"

namespace rejoin::transport::ibverbs {

// Buffers for messages on their way out.
class SendSlots {
 public:
  static constexpr std::size_t kBytes = 4 * KiB;
  Result<> make(const Device& device, std::uint32_t count);
  void reset();  // the device goes away
  std::optional<std::uint32_t> take();
  void give_back(std::uint32_t slot) { free_.push_back(slot); }
  std::span<std::byte> bytes(std::uint32_t slot) { return std::span(memory_).subspan(slot * kBytes, kBytes); }
  std::uint32_t lkey() const { return region_->lkey; }

 private:
  Bytes memory_;
  MemoryRegion region_;
  std::vector<std::uint32_t> free_;
};

struct Work {
  enum class Kind : std::uint8_t { write, read, send } kind = Kind::send;
  std::uint64_t operation = 0;  // whose part it is; 0: nobody's
  bool last = false;            // … and its last one
  bool done = false;            // before one that was handed in earlier
  std::uint64_t address = 0;    // local, of a write or read
  std::uint32_t lkey = 0;
  bool in_host_memory = true;  // the processor may read it
  std::uint64_t length = 0;
  std::uint64_t remote_address = 0;
  std::uint32_t rkey = 0;
  std::uint64_t number = 0;           // of a send, on this queue pair
  std::uint32_t message_bytes = 0;    // of a send, with its header
  std::optional<std::uint32_t> slot;  // where the message is, or
  Bytes message;                      // where there was no free slot
};

// The attributes that bring a queue pair from INIT to RTR and on to RTS.
struct Path {
  ibv_qp_attr receive{}, send{};
  int receive_mask = 0, send_mask = 0;
  std::uint16_t partition = 0;  // index of its key
};

class QueuePair {
 public:
  struct Shared {  // the engine's
    const Device& device;
    const Options& options;
    ibv_cq* completions;
    ibv_srq* receives;
    SendSlots& slots;
  };
  // `tag`, from 1 to 2^24 - 1, comes back with the completions of what is posted here.
  // Unordered: the device places data as it arrives, so that it is no message's carrier, and each work's completion
  // speaks for that work alone.
  enum class Order { kept, none };
  static Result<std::unique_ptr<QueuePair>> make(const Shared& shared, std::uint32_t tag, Order order);
  static constexpr std::uint32_t kLargestTag = 0xffffff;
  static std::uint32_t tag_of(std::uint64_t wr_id) { return static_cast<std::uint32_t>(wr_id >> kNumberBits); }
  ~QueuePair();

  std::uint32_t tag() const { return tag_; }
  bool ordered() const { return order_ == Order::kept; }
  std::uint32_t number() const { return handle_->qp_num; }
  std::uint32_t first_packet() const { return first_packet_; }
  struct Peer {
    ibv_gid gid{};
    std::uint16_t lid = 0;
    std::uint32_t mtu = 0;  // bytes
    std::uint32_t number = 0, first_packet = 0;
  };
  // As rdma_cm has it; also for every time that it is connected again.
  Result<> set_path(const Path& path);
  // Ready to receive and to send. `may_post`: what waits may go out; otherwise after resume().
  Result<> connect(const Peer& peer, bool may_post);
  void resume() { may_post_ = true; }

  Work& add(Work::Kind kind, std::uint64_t length);
  // A send: the header (with its number) and the rest, at most SendSlots::kBytes together.
  Work& add_send(wire::Header header, BytesView rest = {});
  // Posts what fits, with one doorbell. An error ends the endpoint.
  Result<> post();
  std::uint64_t bytes() const { return bytes_; }  // handed in and not done
  const Unsent& unsent() const { return unsent_; }
  bool waiting() const { return posted_ < works_.size(); }
  std::size_t posted() const { return posted_; }
  // It could post but found no slot: another queue pair's completions will free one.
  bool starved() const { return may_post_ && waiting() && posted_ < shared_.options.queue_depth; }

  // A completion of this queue pair; `done` is called for all work that it ends, in order.
  template <typename Done>
  void on_completion(const ibv_wc& completion, Done&& done) {
    const auto behind = behind_oldest(completion);
    if (behind >= posted_) return;
    if (ordered()) finish(behind + 1, done);
    else finish_one(behind, done);
  }
  // A failed completion: what was before it is done, and the work that it names is handed out. reset() must follow.
  template <typename Done>
  std::optional<Work> on_failure(const ibv_wc& completion, Done&& done) {
    const std::uint64_t behind = behind_oldest(completion);
    if (behind >= posted_) return std::nullopt;
    std::optional<Work> failed;
    const auto take = [&](const Work& work) { failed = work; };
    if (ordered()) finish(behind, done), finish(1, take);
    else finish_one(behind, take);
    return failed;
  }
  // Out of service, so that the peer can't do anything through it. What the device had under way completes soon.
  void stop();
  // The device may still complete what the peer has sent: it is in service, or has not said yet that this was the last.
  bool receiving() const { return receiving_; }
  void on_last_receive() { receiving_ = false; }
  // After stop(): anew, unconnected, with what is to be posted again.
  Result<> reset();
  // Before what is left goes out again: sends below this number have arrived.
  template <typename Done>
  void forget_sends_below(std::uint64_t number, Done&& done);
  // After reset(): this operation is not to be done any more; its sends say nothing, and keep their numbers.
  void cancel(std::uint64_t operation);
  // The local region with this key is gone: the device refuses what is still to move there.
  void withdraw(std::uint32_t lkey);
  std::uint64_t received = 0;  // number of the next send expected from the peer

 private:
  QueuePair(const Shared& shared, std::uint32_t tag, Order order) : shared_(shared), tag_(tag), order_(order) {}
  static constexpr std::uint64_t kNumberBits = 40;  // of a wr_id; the rest is the tag
  static constexpr std::uint64_t kNumberMask = (std::uint64_t{1} << kNumberBits) - 1;

  Result<> initialise();
  Path path_to(const Peer& peer) const;
  std::uint64_t behind_oldest(const ibv_wc& completion) const;
  bool prepare(Work& work, ibv_send_wr& request, ibv_sge& sge);
  void release(Work& work);
  static std::size_t counted(const Work& work) {
    return work.kind == Work::Kind::send ? sizeof work + work.message_bytes : 0;
  }
  std::span<std::byte> message_of(Work& work);
  template <typename Done>
  void finish(std::uint64_t count, Done&& done) {
    for (std::uint64_t i = 0; i < count; ++i) {
      Work& work = works_.front();
      bytes_ -= work.length;
      unsent_.remove(counted(work));
      release(work);
      done(std::as_const(work));
      works_.drop_front();
      --posted_;
    }
  }
  template <typename Done>
  void finish_one(std::uint64_t behind, Done&& done) {
    Work& work = works_[behind];
    if (std::exchange(work.done, true)) return;
    bytes_ -= work.length;
    done(std::as_const(work));
    for (; posted_ > 0 && works_.front().done; --posted_) works_.drop_front();
  }

  const Shared shared_;
  const std::uint32_t tag_;
  const Order order_;
  QueuePairHandle handle_;
  std::uint32_t inline_bytes_ = 0;
  std::uint32_t first_packet_ = 0;
  std::optional<Path> path_;  // rdma_cm's
  bool may_post_ = false, receiving_ = false;
  std::uint64_t next_send_ = 0;
  std::uint64_t next_request_ = 0;  // of what is posted next
  std::uint64_t unsignalled_ = 0;
  std::uint64_t bytes_ = 0;
  Unsent unsent_;
  Fifo<Work> works_;        // first those that are posted, of which the last is number next_request_ - 1
  std::size_t posted_ = 0;  // … and then those that wait
};

template <typename Done>
void QueuePair::forget_sends_below(std::uint64_t number, Done&& done) {
  // Up to the last send that has arrived, everything has: they are done in order.
  std::size_t arrived = 0;
  for (std::size_t i = 0; i < works_.size(); ++i)
    if (works_[i].kind == Work::Kind::send && works_[i].number < number) arrived = i + 1;
  std::vector<Work> again;  // reads: the request has arrived, the bytes may not have come back
  for (; arrived > 0; --arrived) {
    Work work = works_.pop_front();
    if (work.kind == Work::Kind::read) {
      again.push_back(std::move(work));
      continue;
    }
    bytes_ -= work.length;
    unsent_.remove(counted(work));
    release(work);
    done(std::as_const(work));
  }
  for (auto work = again.rbegin(); work != again.rend(); ++work) works_.push_front(std::move(*work));
}

}  // namespace rejoin::transport::ibverbs
