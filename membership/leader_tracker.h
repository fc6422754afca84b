// Which of several coordinators leads, as a daemon or relay sees it that is connected with all of them: the one with
// the highest term that says so. What comes from the others is not for its ranks. It tells each of them what it hears
// of the leader (LeaderView), so that they take over where that one is lost. Pure: connections are numbers.
//
// Terms are compared within one job. One of another job, to which an address or a setting that is wrong leads, is not
// followed: a node keeps to the job of its ranks that have heard a plan, and without such to that of the leader that it
// has heard first, until nobody has led that job for two silences and somebody leads another one.
//
// A node that knows one coordinator alone takes it for the leader until it says that it is not.
//
// Where nobody leads of those that it is connected with, it is told where a standby says that another one does: that
// one's address may be missing here. A name may stand for several coordinators: where it is the only one that is known,
// its other addresses are tried. Of several names each is taken for one coordinator's, whatever its addresses are.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "control.pb.h"
#include "membership/note.h"
#include "membership/pause_detector.h"
#include "membership/versions.h"

namespace rejoin::membership {

class LeaderTracker {
 public:
  struct Actions {
    std::vector<std::pair<std::size_t, proto::FromNode>> send;  // to that coordinator
    bool down = false, up = false;   // in this order: the leader is lost; there is one (another, or again)
    bool pass = false;               // the message is the leader's, and for the node
    std::vector<std::size_t> close;  // connections on which nothing comes: to be made anew
    std::vector<std::size_t> alone;  // coordinators that are found to decide alone
    bool elsewhere = false;          // none is followed: at another address of a name may be one that is
    bool leaderless = false;         // nobody has been heard for a silence that leads: to be told
    std::vector<Note> notes;
  };
  // `hosts` writes down the ranks behind this node, and the job of those that have heard a plan, and not the last one,
  // or 0; of several jobs the one that the view names already.
  LeaderTracker(std::string name, Duration silence, std::size_t coordinators,
                std::function<void(proto::LeaderView&)> hosts);

  Actions on_connected(std::size_t coordinator, TimePoint now);
  Actions on_disconnected(std::size_t coordinator, TimePoint now);
  Actions on_message(std::size_t coordinator, const proto::ToNode& message, TimePoint now);
  Actions on_tick(TimePoint now);  // at least every silence / 8

  std::optional<std::size_t> leader() const { return leader_; }
  // Of several one that has answered all that it was asked and not said whether it leads: it shares no decisions.
  bool decides_alone(std::size_t coordinator) const { return coordinators_[coordinator].alone; }
  bool hears_leader() const { return leader_ && !stalled_ && !silent_; }
  bool stalled() const { return leader_ && stalled_; }    // the leader says that it can't write what it decides
  TimePoint hears_since() const { return hears_since_; }  // where it does
  std::uint64_t term() const { return term_; }
  bool is_of_another_job(std::size_t coordinator) const;  // than this node
  // While nobody is followed: who says of another one that it leads this job, of several the one with the highest term.
  std::optional<std::size_t> knows_leader() const;
  bool stands_by(std::size_t coordinator) const;  // it says that it does not lead
  const proto::Leads& says(std::size_t coordinator) const { return *coordinators_[coordinator].says; }

 private:
  struct Coordinator {
    bool connected = false;
    TimePoint since{}, heard{};
    bool welcomed = false;
    std::optional<Spoken> spoken{};      // since it has said anything
    std::optional<proto::Leads> says{};  // whether it leads: last. It is one of several
    Duration pace{};                     // at which one that does not say it is asked for a sign of life
    TimePoint asked{};                   // … last
    bool alone = false;
  };
  void on_welcome(Coordinator& from, const proto::NodeWelcome& welcome) const;
  void ask_for_signs(Actions& actions);
  void on_leads(std::size_t from, const proto::Leads& leads, Actions& actions);
  void weigh(std::size_t from, bool first, Actions& actions);
  void weigh_all(Actions& actions);
  void lose_leader(Actions& actions);
  void miss_leader(Actions& actions);
  void keep_to(std::uint64_t job, Actions& actions);
  void give_job_up(Actions& actions);
  void tell_of_another_job(std::size_t coordinator, Actions& actions) const;
  void report(Actions& actions, bool due);
  void send_view(std::size_t to, Actions& actions);
  std::uint32_t lowest_spoken() const;

  const std::string name_;
  const Duration silence_;
  const std::function<void(proto::LeaderView&)> hosts_;
  PauseDetector pause_detector_;
  std::vector<Coordinator> coordinators_;
  std::optional<std::size_t> leader_;
  std::uint64_t job_ = 0;                  // that it keeps to; 0: not known
  bool of_ranks_ = false;                  // … since ranks here have heard a plan of it
  std::uint64_t term_ = 0, led_term_ = 0;  // the highest heard of; the last leader's
  bool stalled_ = false;                   // the leader, as it says
  bool silent_ = false;                    // … as this node finds
  proto::LeaderView view_;                 // reported last
  TimePoint reported_{}, leaderless_since_{}, hears_since_{}, now_{};
  TimePoint leaderless_told_{}, looked_elsewhere_{};
  std::uint64_t told_term_ = 0;  // that one is said to lead in: told last
  bool supposed_ = false;        // the only coordinator is followed, and has said nothing yet
};

}  // namespace rejoin::membership
