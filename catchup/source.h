// A source serves one joiner out of one local trainer's state: it pins parts at one version, writes them into the
// joiner's memory, and answers the joiner's requests for digests. It runs in the daemon's stream thread, and the
// trainer never waits for it. The messages stand in order in joiner.h.
//
// The trainer may be a joiner itself: then only what is proven is sent, at the version that it has, and no question for
// digests is answered before all is.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "catchup/coder.h"
#include "catchup/link_share.h"
#include "catchup/pacer.h"
#include "catchup/proofs.h"
#include "local/view.h"
#include "stream.pb.h"
#include "transport/transport.h"

namespace rejoin::catchup {

// The 64 bits that notify the joiner of a write: which part and column it carries, and in which generation.
struct WriteTag {
  std::uint32_t part = 0, column = 0;
  bool coded = false;
  std::uint32_t generation = 0;  // tells this write of the part from others, since a part may be written again
  static constexpr std::uint32_t kGenerations = 1u << 29;
  std::uint64_t packed() const {
    return std::uint64_t{generation} << 35 | std::uint64_t{part} << 4 | (coded ? 8 : 0) | column;
  }
  static WriteTag unpack(std::uint64_t bits) {
    return {static_cast<std::uint32_t>(bits >> 4 & 0x7fffffff), static_cast<std::uint32_t>(bits & 7), (bits & 8) != 0,
            static_cast<std::uint32_t>(bits >> 35)};
  }
};
static_assert(local::kMaxColumns <= 8 && local::kMaxParts < std::uint64_t{1} << 31);

class Source {
 public:
  struct Memory {  // the local trainer's memory, registered with the engine
    local::View* view = nullptr;
    std::vector<transport::RegionId> state;  // by memory range
    transport::RegionId shadow;
    const Proofs* proofs = nullptr;  // which of it may be sent
  };

  struct Stats {
    std::uint64_t bytes = 0, wire_bytes = 0;  // state that was sent, and what it took on the wire
    std::uint64_t passed_on = 0;              // of `bytes`: while the rank that it is of was catching up itself
    bool coding = false;
    double link_bytes_per_second = 0, coder_bytes_per_second = 0, ratio = 1;
  };

  Source(transport::Engine& engine, transport::EndpointId joiner, Memory memory, Compression compression, Pacer& pacer,
         const Clock& clock, Duration silence);
  ~Source();

  // Errors: `corrupt` where the message makes no sense for this state; the caller closes the connection.
  Result<> on_fetch(const proto::Fetch& fetch);
  Result<> on_verify(const proto::Verify& verify);
  void on_follow() { followed_ = true; }
  void on_write_completed(std::uint64_t context, bool success, TimePoint now);
  // Starts and finishes whatever can be at this moment.
  void work(TimePoint now);
  // When the next slice may begin that waits for an exchange of gradients; of the past: none waits for that.
  TimePoint due() const;
  // Tells that a message or write could not be sent. The caller then closes the connection, and the joiner asks another
  // source, or connects again.
  bool failed() const { return failed_; }

  Stats stats() const;

 private:
  struct Request {
    std::uint32_t slice = 0;
    std::uint64_t at_least = 0;
    std::array<transport::RemoteRange, local::kMaxColumns> columns;  // in the joiner's memory
  };
  struct PartJob {
    local::View::Pinned pinned;
    bool from_shadow = false;
    bool writing = false;
    std::uint32_t outstanding = 0, generation = 0;
    std::optional<std::uint64_t> digest_sent;  // of the bytes under way
    std::optional<std::uint64_t> digest;       // set: the part is done
    std::optional<std::uint32_t> slot;         // where its coded columns are
    std::array<std::uint32_t, local::kMaxColumns> coded{};
    bool detached = false;  // all of it is coded, so nothing is pinned any more
    std::uint64_t wire_bytes = 0;
  };
  struct SliceJob {
    std::uint64_t number = 0;
    Request request;
    std::uint64_t version = 0;
    std::uint32_t proof = 0;  // names the bytes that were proven when it began
    LinkShare::Begun begun;
    std::vector<PartJob> parts;
  };
  struct Question {
    std::uint64_t request = 0, version = 0;
    std::vector<std::uint32_t> slices;
    std::vector<local::View::Pinned> pinned;  // empty: not pinned yet
    std::vector<std::optional<std::uint64_t>> digests;
  };

  void start_slices(TimePoint now);
  bool may_start(TimePoint now);
  std::uint64_t bytes_of(std::uint32_t slice) const;
  std::optional<SliceJob> begin(const Request& request);
  // Some of these have arrived from a source that had made an update which is still to come here. A joiner that was
  // made a contributor within the step has such slices, too.
  bool ahead(const std::vector<std::uint32_t>& slices, std::uint64_t version) const {
    return std::ranges::any_of(slices, [&](auto slice) { return memory_.view->slice(slice).version() > version; });
  }
  bool still_proven(const SliceJob& job);
  void offer();
  void write_parts(std::span<SliceJob* const> jobs);
  void write_part(SliceJob& job, std::size_t index, std::uint64_t digest);
  bool encode(PartJob& part);
  void sample(const PartJob& part);
  bool advance(Question& question);
  void send(const proto::Stream& message);
  void mind_standing_joiner(TimePoint now);
  std::vector<std::uint32_t> parts_of(std::uint32_t slice) const;

  transport::Engine& engine_;
  const transport::EndpointId joiner_;
  const Memory memory_;
  std::deque<Request> requests_;
  std::map<std::uint64_t, SliceJob> jobs_;  // by number
  std::deque<Question> questions_;
  std::uint64_t next_job_ = 1;
  std::uint32_t generations_ = 0;
  std::uint64_t bytes_sent_ = 0, wire_bytes_ = 0, passed_on_ = 0;
  bool followed_ = false;
  std::uint32_t offered_ = 0;  // so many slices, of those that are proven
  bool offered_all_ = false;
  Pacer& pacer_;
  const Clock& clock_;
  CodingDecision decision_;
  Coder coder_;
  Bytes plain_;    // a column being coded: the trainer may begin to change the original
  Mapping slots_;  // for coded parts on their way; made when first needed
  transport::RegionId slots_region_;
  std::vector<std::uint32_t> free_slots_;
  LinkShare link_;
  const Duration silence_;
  std::uint64_t writes_under_way_ = 0;
  TimePoint moved_at_{};   // when one of them was over last, or the first was posted
  TimePoint looked_at_{};  // when work() was called last
  bool failed_ = false;
};

}  // namespace rejoin::catchup
