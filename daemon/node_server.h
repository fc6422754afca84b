// The daemon of one node. It listens on the unix socket for the node's trainers, keeps the connection to the
// coordinator, and runs the catch-up streams. membership/node.h decides what is said; this class moves it. All of it
// runs in the io_context's thread, but each stream has a thread of its own (stream_thread.h). local.proto has the
// messages between a trainer and the daemon, in order.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>

#include "base/fd.h"
#include "base/refusals.h"
#include "base/unix_socket.h"
#include "daemon/coordinators.h"
#include "daemon/node_options.h"
#include "daemon/opener.h"
#include "daemon/standstill.h"
#include "daemon/stream_thread.h"
#include "daemon/streams.h"
#include "device/remote.h"
#include "local.pb.h"
#include "local/view.h"
#include "membership/node.h"
#include "transport/advertise.h"

namespace rejoin::daemon {

class NodeServer {
 public:
  static Result<std::unique_ptr<NodeServer>> start(asio::io_context& io, const NodeOptions& options,
                                                   const JobKeys& keys);
  ~NodeServer();
  nlohmann::json status() const;
  // Takes no more trainers, and calls `call` once on the daemon's thread when none is connected and the coordinator has
  // heard of the last, or is not connected.
  void retire(std::function<void()> call);

 private:
  // A stream for all ranks whose state is in the host's memory, or for one rank whose state is on a GPU. The trainer of
  // that rank serves the GPU's memory to the daemon.
  struct DeviceStream {
    std::shared_ptr<device::Device> device;
    std::shared_ptr<device::RemoteDevice> remote;  // `device`, where it is a GPU; otherwise null
    std::unique_ptr<StreamThread> thread;
    pid_t trainer = 0;  // whose GPU's memory it is; 0: not known, or none
    Standstill still;
    Duration stands{};  // for how long it has, if that is long
    std::uint64_t bytes_served = 0, bytes_passed_on = 0;
    std::vector<std::pair<catchup::RankKey, catchup::Source::Stats>> serving;
    DeviceStream() = default;
    DeviceStream(const DeviceStream&) = delete;
    ~DeviceStream() {
      if (remote) remote->disconnect();  // so that the thread waits for no trainer
    }
  };
  // What a trainer registers with, until all of its descriptors have come.
  struct Offering {
    proto::LocalHello hello;
    std::vector<Fd> fds;  // those that have come
  };
  struct Trainer {
    membership::RankConnection id;
    StreamThread* stream = nullptr;     // the stream of its device; null until it has registered
    std::unique_ptr<DeviceStream> own;  // that stream, where its state is on a GPU
    Fd socket;
    PeerCredentials credentials;
    std::unique_ptr<asio::posix::stream_descriptor> readable;
    std::unique_ptr<asio::posix::stream_descriptor> exited;  // a pidfd, readable when the process has ended
    std::deque<std::string> unsent;  // messages that its socket has not taken yet (node_unsent.cc)
    std::size_t unsent_bytes = 0;
    bool awaits_room = false;
    int ticks_unread = 0;  // for how many it has read nothing of them
    std::optional<Offering> offering;
    bool opening = false;  // its state, and a stream for its GPU, are being opened, or were
    bool told_to_wait = false;
    std::optional<catchup::RankKey> key;
    std::string listens;               // its engine's own address
    std::string card, card_listening;  // as it has told them
    bool outside = false;              // it is no part of the job, says the coordinator
    bool catching_up = false;
    std::optional<Incarnation> serves;
    proto::Heartbeat ring;      // the last one, with the counters of its all-reduces
    proto::Heartbeat reported;  // the one of which the coordinator was sent a Report last
  };

  NodeServer(asio::io_context& io, const NodeOptions& options, const JobKeys& keys);
  void accept();
  void accept_later();                           // after the process has run out of descriptors
  Result<> watch(Trainer& trainer, Fd watched);  // `watched` is a duplicate of its socket
  void read(membership::RankConnection id);
  // Why a trainer is not taken, and as what that counts.
  using Why = refusals::Why;
  struct Refusal {
    Refusal(Error its, Why as = Why::offer) : error(std::move(its)), why(as) {}
    Error error;
    Why why;
  };
  using Taken = tl::expected<void, Refusal>;
  static tl::unexpected<Refusal> refused_as(Why why, std::string message);
  Taken on_hello(Trainer& trainer, const proto::LocalHello& hello);
  Taken on_descriptors(Trainer& trainer, std::vector<Fd> fds);
  void drop(membership::RankConnection id, const std::string& reason, membership::Node::Gone how);
  void drop_silent(membership::RankConnection id, const std::string& reason, membership::Node::Gone how);
  void on_hang_up(membership::RankConnection id, const Error& why);
  std::map<membership::RankConnection, Trainer>::iterator find_trainer(const catchup::RankKey& key);
  void note_answer(const proto::ToNode& message);
  void remember(const Trainer& trainer, const std::string& reason);
  void forget_gone();
  void record_plan(const proto::ToNode& message) const;
  static void record_progress(const catchup::RankKey& key, const catchup::CatchUpProgress& progress);
  void on_leave(membership::RankConnection id, const proto::LocalLeave& leave);
  void say_left(membership::RankConnection id);
  void answer_leavers();
  void send(Trainer& trainer, const proto::ToTrainer& message);
  void write(Trainer& trainer);
  void write_later(Trainer& trainer);
  void give_up(Trainer& trainer, const Error& why);
  void drop_soon(const Trainer& trainer, const std::string& reason);
  void drop_who_reads_nothing();
  void send_at_last(Trainer& trainer, const proto::ToTrainer& message);
  void end_if_nobody_is_left();
  void tick();
  void give_sign_of_life();
  // node_threads.cc. Why a thread stands still, and what to do; empty: it does not.
  void mind_threads();
  static std::string why_stream_stands(const DeviceStream& stream);
  std::string why_opener_stands() const;
  std::vector<std::string> standing() const;
  std::vector<const DeviceStream*> streams_here() const;
  void end_threads();
  void tell();
  proto::Report describe(ReplicaId replica, Duration since_last);
  void keep_listening();
  void carry_out(const membership::Node::Actions& actions);
  void follow_plan(bool other_peers);
  void warn_of(const StrangeStream& stream);
  Taken admit(Trainer& trainer, const proto::LocalHello& hello, local::View view, DeviceStream& stream);
  Taken clear_place(const Trainer& newcomer, const catchup::RankKey& key, const proto::RankUp& up);
  static bool has_ended(const Trainer& trainer);
  void look_after(const proto::Inquiry& inquiry);
  void look_for_ends();
  void refuse(membership::RankConnection id, const Refusal& refusal);
  // Thread: any. `of` is the trainer whose GPU the stream is for; none: it is for the host's memory.
  Result<std::unique_ptr<DeviceStream>> open_stream(std::optional<membership::RankConnection> of,
                                                    std::shared_ptr<device::Device> device, const std::string& listen);
  // Thread: any.
  Result<std::unique_ptr<DeviceStream>> open_remote(membership::RankConnection of, Offering& offering);
  struct Opened {
    std::unique_ptr<DeviceStream> stream;  // null: its state is in the host's memory
    std::optional<local::View> view;
  };
  // Thread: any. It takes the descriptors.
  Result<Opened> open(membership::RankConnection of, Offering& offering);
  void on_opened(membership::RankConnection from, const proto::LocalHello& hello);
  DeviceStream* stream_of(std::optional<membership::RankConnection> of);  // null: it has gone
  void on_report(std::optional<membership::RankConnection> of, StreamThread::Report report);
  // node_addresses.cc. Where peers find a trainer's engine, and its stream; before a coordinator has been connected
  // with, where these listen. Errors: `unavailable`, where peers can be told of no address.
  struct Place {
    std::string engine, stream, card;
  };
  Result<Place> place_of(const Trainer& trainer, const StreamThread& stream) const;
  std::string card_of(const Trainer& trainer) const;
  Result<std::string> advertised(const std::string& stream) const;
  Result<std::string> advertised_of_trainer(const std::string& address) const;
  Result<std::string> told(const std::string& listening) const;
  bool needs_own_hosts() const;
  void find_own_hosts(bool connected_anew);
  bool place_trainers();
  void look_for_own_hosts();
  void say_where_it_is();
  TimePoint now() const { return SteadyClock().now(); }

  asio::io_context& io_;
  const NodeOptions options_;
  const JobKeys& keys_;
  Fd listener_fd_;
  std::optional<SocketFile> socket_file_;
  bool unreachable_ = false;  // no trainer can come, and that was logged
  asio::posix::stream_descriptor listener_;
  std::uint64_t listens_ = 0;  // how often the listener was made anew; what an earlier one still accepts is ignored
  asio::steady_timer accept_again_;
  // Limit the log lines that descriptors, or watches, have run out, and that another user has called.
  Seldom without_descriptors_{kSameLineAgain}, without_watches_{kSameLineAgain}, strangers_{std::chrono::minutes(1)};
  asio::steady_timer timer_;
  const std::string family_;  // of the catch-up streams
  membership::Node machine_;
  Streams streams_;
  std::set<StrangeStream> warned_of_;
  std::map<membership::RankConnection, Trainer> trainers_;
  static constexpr int kMessagesAtOnce = 64;  // of one trainer, so that others have the thread in between
  struct Silent {
    catchup::RankKey key;
    pid_t pid = 0;
    std::unique_ptr<asio::posix::stream_descriptor> exited;
  };
  std::map<membership::RankConnection, Silent> silent_;  // dropped, and their processes have not ended yet
  struct Leaver {
    Fd socket;
    TimePoint since{};
  };
  std::map<membership::RankConnection, Leaver> leavers_;  // who has left, and has not been answered yet
  TimePoint sign_given_{};                                // when trainers were last sent a Heartbeat
  struct GoneTrainer {
    pid_t pid = 0;
    std::optional<std::uint64_t> began;  // when the process did (exiting.h); none: it has ended
    std::string reason;
    TimePoint at{};
    std::uint64_t job = 0, incarnation = 0;  // whoever is a member later has its place
  };
  static constexpr std::size_t kMostGone = 256;   // the oldest are forgotten
  std::map<catchup::RankKey, GoneTrainer> gone_;  // for each place that nobody has, who had it last
  std::uint64_t next_trainer_ = 1;
  const std::uint64_t reports_as_;  // random
  std::function<void()> nobody_is_left_;
  Coordinators coordinators_;
  std::map<catchup::RankKey, catchup::CatchUpProgress> progress_;
  std::uint64_t rejected_ = 0;
  catchup::Compression compression_{};
  std::unique_ptr<DeviceStream> host_;
  std::optional<transport::OwnHosts> own_hosts_;  // none before it has been connected with a coordinator
  bool coordinator_is_here_ = false;              // on this machine
  TimePoint own_hosts_sought_{};
  std::string said_where_;  // the last line in the log
  bool warned_of_loopback_ = false;
  std::uint64_t served_by_gone_ = 0;     // bytes
  std::uint64_t passed_on_by_gone_ = 0;  // of them
  std::uint64_t refetched_ = 0;          // slices, by joiners that are or were here
  TimePoint reported_at_{};              // when the coordinator was last sent Reports
  std::string coordinator_page_;         // the address of its status page
  Standstill opener_still_;
  Duration opener_stands_{};
  std::map<membership::RankConnection, Result<Opened>> opening_;  // the opener's, until on_opened()
  std::optional<Opener> opener_;                                  // there once started
};

}  // namespace rejoin::daemon
