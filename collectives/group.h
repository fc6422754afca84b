// One member of a group: connections to all others, and the collective operations and messages between two members that
// run over them. Its membership is given from outside, by reconfigure(); when a member is lost everything that is under
// way fails on all members, and nothing goes on before the next reconfigure().
//
// It owns no thread: whoever owns the engine calls it, and everything happens inside its calls.
//
// The messages between two members, in order (wire.h): of each configuration, hello from the lower rank, welcome from
// the higher one when it has the same configuration. Then for each transfer `ready` from the receiver, which names the
// memory, and the bytes from the sender: in a message if they are few, else written. At last `goodbye` from one that
// closes, or goes on to another configuration with nothing under way, and `farewell` from the other; or `abort` with
// the reason from each that fails.
//
// A receiver names the memory of an operation that it has begun, and withdraws it before it reports the operation's
// failure, so that whatever becomes of a sender, nothing lands in memory that its owner has back. To withdraw memory
// may cost a connection, and what was said on it: so a member that fails tells the others why, and they tell it that
// they have failed, too, before it does.
//
// Operations of a GPU's memory: what the CPU adds and copies on the host, a reducer does, so that nothing here calls
// the driver ("No driver between hand-over and flag" in docs/design-notes.md); and they begin when the caller says.
//
// group.cc: operations. on_device.cc: those of a GPU's memory. transfers.cc: what they send and receive.
// configuration.cc: members and their connections.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "base/types.h"
#include "collectives/plan.h"
#include "device/reducer.h"
#include "transport/transport.h"

namespace rejoin::collectives {

constexpr std::uint32_t kAtOnce = 2;  // collectives: while one waits for its last bytes, the next begins

constexpr bool combines(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce || kind == Collective::reduce_scatter;
}

// All members must have the same signature in a collective operation.
struct Signature {
  std::uint64_t bytes = 0;
  std::uint32_t root = 0;
  Collective kind{};
  DataType type{};  // of the elements, where they are combined
  Combine combine{};
  transport::MemoryKind memory{};
  bool operator==(const Signature&) const = default;
};
std::string describe(const Signature& signature);  // "all_reduce (sum) of 4096 bytes of float32"

using Done = std::function<void(const Result<>&)>;

struct Operation {
  Signature signature;
  Plan plan;
  // The memories that the plan's builder names. They are the caller's and stay until `done` is called; the last of them
  // are written to.
  std::vector<std::span<std::byte>> memory;
  std::uint32_t tag = 0;  // for send and receive
  // For a GPU's memory: `ready` says whether the caller's stream has come to the operation, and is asked until it has;
  // `exported` has the dma-buf of each memory that has one.
  std::function<bool()> ready;
  std::vector<std::optional<device::Device::Exported>> exported;
  TimePoint deadline{};
  Done done;  // called once, within a call of poll(), submit(), reconfigure() or abort()
};

// Says how others reach a member.
struct Handle {
  std::array<std::uint64_t, 2> secret{};  // who knows it may connect
  transport::Address address;
};

class Group {
 public:
  // `own` says how others reach this member. The engine listens already, and outlives this.
  // `reducer` adds in a GPU's memory, which the engine then takes. It has an external launcher, and whoever submits
  // operations on such memory holds its kernel until they are done.
  Group(transport::Engine& engine, Handle own, std::shared_ptr<device::Reducer> reducer = nullptr);
  ~Group();  // leaves without waiting for anybody

  // From now on these are the members, and this one is `rank` of them. What is under way fails with `cancelled`, and
  // with it all that is under way on the others; where nothing is and nothing has failed, others go on with operations
  // of before that do not need this one. All connections are made anew, so that nothing of the time before arrives. All
  // members give the same `number` and the same members; `done` is called when all of them are here, or at the
  // deadline, with those that are not.
  void reconfigure(std::uint64_t number, std::vector<Handle> members, std::uint32_t rank, TimePoint deadline,
                   Done done);
  // Collective operations start in the order of their submission, which is the same on all members.
  void submit(Operation operation);
  // Memory of the GPU that operations use as scratch, which stays mapped while the group lives. Before the caller
  // submits a collective operation on a GPU's memory it gives kAtOnce of these that have at least the bytes of its
  // plan's scratch.
  struct DeviceScratch {
    std::span<std::byte> memory;
    std::optional<device::Device::Exported> exported;
  };
  void give_scratch(DeviceScratch scratch);
  // Has everything under way fail, here and on the other members.
  void abort(const Error& error);
  // Whether what is submitted fails until the next reconfigure(): this member has given up, or has heard that another
  // has.
  bool failed() const { return failed_.has_value(); }
  // Tells the others that this member needs nothing more of them, and aborts what is under way. left() says whether all
  // have heard it.
  void leave();
  bool left() const;

  void poll(TimePoint now);
  bool busy() const { return !active_.empty() || configuring_ || failing_; }
  bool working() const { return reducer_ && !reducer_->idle(); }  // the GPU works and wakes nobody: poll() again
  // Returns when poll() has something to do even if nothing comes.
  TimePoint next_deadline(TimePoint now) const;

  std::uint64_t steps() const { return steps_; }  // grows with everything that happens

  std::uint32_t rank() const { return rank_; }
  std::uint32_t size() const;

 private:
  struct Peer;
  struct Active;
  struct Scratch;
  struct Ready;
  struct Hello;
  using Key = std::array<std::uint64_t, 3>;  // of an operation: which channel, with whom, the how manieth

  void handle(const transport::Event& event);
  void on_message(std::uint32_t rank, BytesView message);
  // Members.
  void on_accepted(const transport::Event& event);
  void on_closed(const transport::Event& event);
  void on_parted(const transport::Event& event);
  bool is_of_this(const Hello& hello) const;
  void welcome(const Hello& hello, transport::EndpointId endpoint);
  void on_welcome(std::uint32_t rank, BytesView message);
  void connect_missing();
  void member_is_here(std::uint32_t rank);
  void see_whether_all_are_here();
  std::string missing() const;
  void drop_connections();
  void part();
  void on_goodbye(std::uint32_t rank, bool had_all);
  void answer_goodbyes();
  // Operations.
  void start_waiting();
  void start(std::unique_ptr<Active> active);
  void fail_starting(std::unique_ptr<Active> active, Error error);
  void begin(Active& active);
  void unblocked(Active& active, std::uint32_t task);
  // On a GPU.
  void begin_what_is_ready();
  void give_work(Active& active, std::uint32_t task);
  void finish_works();
  void wait_for_works();
  Result<transport::RegionId> register_on_device(std::span<std::byte> memory,
                                                 const std::optional<device::Device::Exported>& exported,
                                                 transport::Access access);
  void finished(Active& active, std::uint32_t task);
  void end_if_over(Active& active);
  void on_ready(std::uint32_t rank, const Ready& ready);
  void match(Active& active, std::uint32_t rank, const Ready& ready);
  void post(Active& active, std::uint32_t task, const Ready& ready);
  void receive(Active& active, std::uint32_t task);
  void arrived(std::uint32_t rank, std::uint64_t id, std::optional<BytesView> payload);
  void leave_out_what_peers_do_not_speak(Operation& operation) const;
  std::span<std::byte> bytes_at(Active& active, const Operand& operand, std::uint64_t length);
  Result<transport::RegionId> region_of(Active& active, std::uint32_t memory);
  Result<> take_scratch(Active& active);
  Result<transport::RegionId> register_scratch(const Scratch& scratch);
  void give_back(Active& active);
  static bool by_message(const Active& active, std::uint64_t length);
  void check_deadlines();
  std::string what_it_waits_for(const Active& active) const;
  void fail_all(Error error, bool tell_others = true);
  void tell_of_failure(Peer& peer);
  void fail_at_once(Error error);
  bool others_have_heard() const;
  void end_failing();
  bool send(std::uint32_t rank, BytesView message);
  std::string name(std::uint32_t rank) const;
  Error gone(std::uint32_t rank, std::string_view why) const;
  Error has_left(std::uint32_t rank) const;
  void call(Done done, Result<> result);
  void run_callbacks();

  transport::Engine& engine_;
  const Handle own_;
  const std::shared_ptr<device::Reducer> reducer_;
  TimePoint now_{};
  std::uint64_t steps_ = 0;

  // The configuration.
  std::uint64_t number_ = 0, digest_ = 0, members_ = 0;  // members_: see Hello
  std::uint32_t rank_ = 0;
  std::vector<Peer> peers_;  // by rank; this one's own is never connected
  std::map<transport::EndpointId, std::uint32_t> rank_of_;
  std::map<transport::EndpointId, Hello> early_;  // who is in a configuration that this member may get to
  // To those of the configuration before, which have yet to hear that this member needs nothing more of them.
  std::set<transport::EndpointId> parted_;
  TimePoint parted_by_{};  // whoever has not heard it by then is waited for no more
  bool configuring_ = false, leaving_ = false;
  TimePoint configured_by_{}, connect_again_{};
  Done configured_;
  std::optional<Error> failed_;  // nothing runs until the next configuration
  // A peer has refused a write. It has failed, then, and its abort, which says why, comes behind the refusal.
  struct Refused {
    Error error;
    TimePoint until;  // … unless it does not come
  };
  std::optional<Refused> refused_;
  // What has failed, with its memory, until the others have heard.
  struct Failing {
    Error error;
    TimePoint until;  // … unless they do not answer
    std::vector<std::unique_ptr<Active>> active;
  };
  std::optional<Failing> failing_;

  // Operations.
  std::uint64_t collectives_ = 0, ids_ = 0;
  std::map<Key, std::uint64_t> between_two_;     // how many there were on a channel
  std::deque<std::unique_ptr<Active>> waiting_;  // collectives
  bool starting_ = false;                        // those that wait
  std::multiset<TimePoint> deadlines_;           // of all that waits or is active
  std::map<Key, std::unique_ptr<Active>> active_;
  std::uint32_t active_collectives_ = 0;
  std::map<Key, std::vector<std::pair<std::uint32_t, Ready>>> ready_early_;  // for what is not active here
  std::size_t ready_early_count_ = 0;
  struct Transfer {
    Active* active = nullptr;
    std::uint32_t task = 0;
  };
  std::map<std::uint64_t, Transfer> receives_, writes_;
  std::vector<Scratch> scratch_;  // free
  struct Work {
    std::uint64_t number = 0;  // the reducer's
    Active* active = nullptr;  // none: it has failed
    std::uint32_t task = 0;
  };
  std::deque<Work> works_;     // on the GPU, in order
  std::size_t not_ready_ = 0;  // operations that are active, and whose callers' streams have not come to them
  std::vector<std::pair<Done, Result<>>> callbacks_;
};

}  // namespace rejoin::collectives
