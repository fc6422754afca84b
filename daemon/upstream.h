// This is the connection of a daemon or a relay to a coordinator, or of a daemon to a relay, which looks the same. It
// connects, proves the job key, and connects again for as long as its owner lives. Neither connecting nor the proof may
// take longer than the silence, because the system itself would retry a connection that met a cut link after ever
// longer pauses. A name is resolved anew at each try, since it may have come to mean another machine, but one that is
// still being resolved since an earlier try is waited for; of several addresses the one that was heard last is called
// first, the others shortly after it, and each further try begins with another one.
//
// What lies between may forget a connection (a firewall that fails over, address translation), and neither end hears
// of that: over one that is not heard nothing comes any more, and a new one would pass. So that is made beside it,
// before the silence is over, and takes its place when it is up, unless the old one is heard before. In the same way
// another address of a name is tried where the one that answers does not lead.
// Everything runs in the io_context's thread.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control.pb.h"
#include "daemon/framed.h"
#include "daemon/resolver.h"
#include "membership/pause_detector.h"
#include "membership/versions.h"

namespace rejoin::daemon {

class Upstream {
 public:
  struct Handlers {
    std::function<void()> up;
    std::function<void(const proto::ToNode&)> message;
    std::function<void()> down;      // it is tried again
    std::function<bool()> over;      // the job is finished: a coordinator that ends has no more to do
    std::function<void()> rejected;  // bytes that are no message came, and were ignored
  };
  // `one_of_several`: that it is connected is no news, unless it was not. `name`: of the host, where the address has
  // another: what its certificate must be for.
  Upstream(asio::io_context& io, std::string address, const JobKeys& keys, std::chrono::milliseconds silence,
           Handlers handlers, bool one_of_several = false, std::string name = {})
      : io_(io),
        address_(std::move(address)),
        keys_(keys),
        silence_(silence),
        handlers_(std::move(handlers)),
        one_of_several_(one_of_several),
        name_(std::move(name)),
        resolver_(io),
        pause_detector_(silence) {}
  ~Upstream();
  Upstream(const Upstream&) = delete;
  // The ends of its connection, "host:port": this machine's, and the other one.
  struct Ends {
    std::string here, there;
  };
  Upstream& operator=(const Upstream&) = delete;
  void connect();
  void send(const proto::FromNode& message);
  // Nothing more is sent. `over` is called once while this lives, when all that was sent has been read, or can't be any
  // more, or the coordinator has not been heard for a silence.
  void finish(std::function<void()> over);
  void tick(TimePoint now);  // at least every silence / 8
  // Connects anew if the coordinator was last heard too long ago, since a silent coordinator is as good as gone.
  void check(TimePoint heard);
  void connect_anew(const std::string& why);
  // What answers is not what is looked for. If the address is a name that stands for others as well, those are called,
  // and one that shows the key takes this one's place.
  void look_elsewhere();
  void stay();  // what answers is what is looked for, after all
  const std::string& address() const { return address_; }
  const Ends& ends() const { return ends_; }                 // of the connection that is up, or was last
  bool up() const { return up_; }                            // it has shown the key
  const std::string& why_lost() const { return why_lost_; }  // empty while it is heard, and before the first try
  bool was_refused() const { return refused_; }              // the last time, by either side
  const std::string& refusal() const { return refusal_; }    // what it said last, where it speaks another protocol
  membership::Spoken spoken() const { return spoken_; }      // with it, as far as it has said
  // Its address, whether it is connected, as whoever asks knows, and the reason why not.
  nlohmann::json status(bool connected) const;

 private:
  struct Attempt;
  void limit_time();
  void resolve(const std::string& host, std::uint16_t port);
  void connect_to(Resolver::Endpoints endpoints);
  void call_others(Resolver::Endpoints endpoints);
  void note_tried(const asio::ip::tcp::endpoint& one);
  void call_next();
  void talk(asio::ip::tcp::socket socket, const asio::ip::tcp::endpoint& called);
  void on_up(const Ends& ends, const asio::ip::tcp::endpoint& called);
  void on_bytes(std::string_view bytes);
  void on_refusal(const proto::NodeWelcome& welcome);
  void on_welcome(const proto::NodeWelcome& welcome);
  static std::string without_a_word(const std::string& why);
  void lost(const std::string& why);
  void not_connected(const std::string& why);
  void tell_that_it_is_not_connected(const std::string& why, bool refused);
  void try_again(bool refused);
  void end_attempt();

  asio::io_context& io_;
  const std::string address_;
  const JobKeys& keys_;
  const std::chrono::milliseconds silence_;
  const Handlers handlers_;
  const bool one_of_several_;
  const std::string name_;
  Resolver resolver_;
  std::shared_ptr<Attempt> attempt_;    // under way, or waited for
  std::shared_ptr<Framed> next_;        // that it has led to, and the key is not shown yet
  std::shared_ptr<Framed> connection_;  // that is up
  membership::PauseDetector pause_detector_;
  TimePoint last_heard_{}, got_through_{};  // got_through_: nothing was to be sent again
  Duration their_silence_{}, apart_{};      // apart_: from other nodes, so that they don't call all at once
  Ends ends_;
  bool up_ = false, heard_ = false;  // it has shown the key; and has said something since
  std::string why_lost_;
  bool refused_ = false;
  std::string refusal_;
  membership::Spoken spoken_;
  std::string release_;                         // of it, where it has said
  std::optional<bool> logged_refused_;          // that it is not connected was logged, and whether as a refusal
  std::chrono::milliseconds pause_{0};          // before the last try
  std::size_t tries_ = 0;                       // since it was heard
  bool elsewhere_ = false;                      // what is under way is for another address of the name
  std::vector<asio::ip::tcp::endpoint> tried_;  // of those, in their order
  asio::ip::tcp::endpoint called_, heard_at_;   // over the connection that is up
  std::function<void()> finished_;              // where nothing more is sent: to be called
};

}  // namespace rejoin::daemon
