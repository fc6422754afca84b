// Who is in the group: connections to all members of a configuration, made anew for each.
#include <algorithm>
#include <utility>

#include "base/digest.h"
#include "base/fail.h"
#include "collectives/internal.h"

namespace rejoin::collectives {

using transport::EndpointId, transport::Event;

namespace {

constexpr Duration kConnectAgain = std::chrono::milliseconds(20);
constexpr Duration kPartedBy = std::chrono::seconds(1);
constexpr std::size_t kMostEarlyMembers = 4096;  // connections of configurations that this member is not in

std::string versions(std::uint32_t oldest, std::uint32_t newest) {
  return newest > oldest ? fmt::format("versions {} to {}", oldest, newest) : fmt::format("version {}", oldest);
}

}  // namespace

void Group::reconfigure(std::uint64_t number, std::vector<Handle> members, std::uint32_t rank, TimePoint deadline,
                        Done done) {
  REJOIN_CHECK(rank < members.size());
  for (const auto endpoint : std::exchange(parted_, {})) engine_.close(endpoint);
  if (!failed_ && !configuring_ && !leaving_ && active_.empty() && waiting_.empty()) part();
  fail_at_once({ErrorCode::cancelled, fmt::format("the process group was reconfigured (to configuration {})", number)});
  drop_connections();
  failed_.reset();
  leaving_ = false;
  collectives_ = 0;
  between_two_.clear();
  number_ = number, rank_ = rank;
  Bytes all, secrets;
  for (auto& member : members) {
    put(all, member.secret);
    put(secrets, member.secret);
    const auto text = as_bytes(member.address.text);
    put(all, text.size());
    all.insert(all.end(), text.begin(), text.end());
    peers_.push_back({.handle = std::move(member)});
  }
  digest_ = digest(all);
  members_ = digest(secrets);
  configuring_ = true, configured_ = std::move(done), configured_by_ = deadline;
  connect_again_ = {};
  for (auto early = early_.begin(); early != early_.end();) {
    const auto [endpoint, hello] = *early;
    if (!is_of_this(hello)) {
      ++early;
      continue;
    }
    early = early_.erase(early);
    welcome(hello, endpoint);
  }
  see_whether_all_are_here();
  run_callbacks();
}

void Group::drop_connections() {
  for (const auto& peer : peers_)
    if (peer.stage != Stage::missing) engine_.close(peer.endpoint);
  peers_.clear();
  rank_of_.clear();
}

// The others may be at operations that this one has ended: it says that it needs nothing more of them, and what it has
// sent arrives before that. Connections stay until they have heard it.
void Group::part() {
  parted_by_ = now_ + kPartedBy;
  const auto goodbye = joined(Message::goodbye, bytes_of(std::uint8_t{1}));
  for (auto& peer : peers_) {
    if (peer.stage == Stage::here && engine_.send(peer.endpoint, goodbye)) parted_.insert(peer.endpoint);
    else if (peer.stage != Stage::missing) engine_.close(peer.endpoint);
  }
  peers_.clear();
  rank_of_.clear();
}

// It has heard, or has gone on itself.
void Group::on_parted(const Event& event) {
  BytesView message = event.message;
  Message kind{};
  if (event.kind != transport::EventKind::message || !take(message, kind)) return;
  const bool over = kind == Message::goodbye || kind == Message::farewell || kind == Message::abort;
  if (over && parted_.erase(event.endpoint) > 0) engine_.close(event.endpoint);
}

// This member connects to those of higher ranks; one that is not there yet, or has closed the connection since it was
// in another configuration, is tried again.
void Group::connect_missing() {
  if (now_ < connect_again_) return;
  connect_again_ = now_ + kConnectAgain;
  for (std::uint32_t rank = rank_ + 1; rank < size() && configuring_; ++rank) {
    auto& peer = peers_[rank];
    if (peer.stage != Stage::missing) continue;
    const Hello hello{
        .secret = peer.handle.secret, .number = number_, .digest = digest_, .rank = rank_, .members = members_};
    const auto said = peer.may_be_old ? bytes_of(hello).first(kFirstHelloBytes) : bytes_of(hello);
    const auto endpoint = engine_.connect({peer.handle.address.text, transport::Secret::of(peer.handle.secret)}, said);
    if (!endpoint && endpoint.error().code == ErrorCode::invalid_argument) return fail_all(endpoint.error());
    peer.not_reached = endpoint ? "" : endpoint.error().message;
    if (!endpoint) continue;
    peer.stage = Stage::connecting;
    peer.endpoint = *endpoint;
    rank_of_[*endpoint] = rank;
  }
}

void Group::on_accepted(const Event& event) {
  static_assert(offsetof(Hello, newest) == kFirstHelloBytes);
  Hello hello;
  if (event.message.size() >= kFirstHelloBytes)
    std::memcpy(&hello, event.message.data(), std::min(event.message.size(), sizeof hello));
  if (event.message.size() < kHelloWithVersionBytes) hello.newest = hello.oldest;
  if (event.message.size() < sizeof hello) hello.members = 0;
  const bool known = event.message.size() >= kFirstHelloBytes && hello.secret == own_.secret;
  if (!known || (early_.size() == kMostEarlyMembers)) return engine_.close(event.endpoint);
  if (!peers_.empty() && is_of_this(hello) && !failed_) return welcome(hello, event.endpoint);
  early_[event.endpoint] = hello;
}

bool Group::is_of_this(const Hello& hello) const {
  return hello.number == number_ && (hello.digest == digest_ || (hello.members != 0 && hello.members == members_));
}

// That one is in this configuration, too.
void Group::welcome(const Hello& hello, EndpointId endpoint) {
  const auto rank = hello.rank;
  if (rank >= rank_ || peers_[rank].stage != Stage::missing || !configuring_) return engine_.close(endpoint);
  peers_[rank].endpoint = endpoint;
  rank_of_[endpoint] = rank;
  if (hello.oldest > kNewest || hello.newest < kOldest) {
    peers_[rank].stage = Stage::here;  // for fail_all() to tell it, which ends the configuring
    peers_[rank].has_failed = true;    // it needs nothing more
    return fail_all(
        {ErrorCode::invalid_argument,
         fmt::format("{} speaks {} of a process group's messages, and {} {}: give all members releases that follow "
                     "each other, or the same one",
                     name(rank), versions(hello.oldest, hello.newest), name(rank_), versions(kOldest, kNewest))});
  }
  peers_[rank].version = std::min(hello.newest, kNewest);
  peers_[rank].stage = Stage::connecting;
  if (engine_.send(endpoint, joined(Message::welcome, bytes_of(kNewest)))) return member_is_here(rank);
  // It has gone again, and is waited for as if it had not come.
  rank_of_.erase(endpoint);
  peers_[rank].stage = Stage::missing;
  engine_.close(endpoint);
}

void Group::on_welcome(std::uint32_t rank, BytesView message) {
  auto& peer = peers_[rank];
  std::uint32_t newest = kOldest;
  if (peer.stage == Stage::connecting && take(message, newest) && !peer.may_be_old)
    peer.version = std::min(newest, kNewest);
  member_is_here(rank);
}

void Group::member_is_here(std::uint32_t rank) {
  if (peers_[rank].stage != Stage::connecting) return;
  peers_[rank].stage = Stage::here;
  if (failed_) return tell_of_failure(peers_[rank]);  // it has a configuration that this member has given up
  see_whether_all_are_here();
}

void Group::see_whether_all_are_here() {
  if (!configuring_) return;
  for (std::uint32_t rank = 0; rank < size(); ++rank)
    if (rank != rank_ && peers_[rank].stage < Stage::here) return;
  configuring_ = false;
  call(std::move(configured_), {});
}

std::string Group::missing() const {
  std::string who;
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    const auto& peer = peers_[rank];
    if (rank == rank_ || peer.stage >= Stage::here) continue;
    who += (who.empty() ? "" : ", ") + name(rank);
    if (!peer.not_reached.empty()) who += fmt::format(" ({})", peer.not_reached);
  }
  return fmt::format(
      "timed out: configuration {} of {} members lacks {}: reconfigure all of them, each with the same "
      "new number and the same members",
      number_, size(), who);
}

void Group::on_closed(const Event& event) {
  engine_.close(event.endpoint);
  if (early_.erase(event.endpoint) > 0 || parted_.erase(event.endpoint) > 0) return;
  const auto found = rank_of_.find(event.endpoint);
  if (found == rank_of_.end()) return;
  const auto rank = found->second;
  auto& peer = peers_[rank];
  rank_of_.erase(found);
  const auto stage = peer.stage;
  peer.heard_goodbye = true;                       // whatever it heard
  if (stage == Stage::left) peer.answered = true;  // it needs no answer any more
  else peer.stage = Stage::missing;
  if (failed_ || stage == Stage::left || leaving_) return;
  if (configuring_ && stage == Stage::connecting) {  // it is tried again
    peer.may_be_old = !peer.may_be_old;
    if (peer.may_be_old) connect_again_ = {};
    return;
  }
  fail_all(gone(rank, event.error ? event.error->message : "it closed the connection"));
}

void Group::leave() {
  const bool under_way = !active_.empty() || !waiting_.empty() || failing_;
  fail_all({ErrorCode::cancelled, "the process group was shut down"}, under_way);
  if (!under_way || others_have_heard()) end_failing();
  leaving_ = true;
  const auto kind = Message::goodbye;
  for (auto& peer : peers_) {
    if (peer.stage == Stage::here && !engine_.send(peer.endpoint, bytes_of(kind))) peer.heard_goodbye = true;
    if (peer.stage != Stage::here) peer.heard_goodbye = true;
  }
  run_callbacks();
}

bool Group::left() const {
  return !failing_ && (parted_.empty() || now_ >= parted_by_) &&
         std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.heard_goodbye; });
}

// What waits for it waits in vain; what it was sent may still be on its way. Where it has had all, they will all be
// here.
void Group::on_goodbye(std::uint32_t rank, bool had_all) {
  peers_[rank].stage = Stage::left;
  if (configuring_ && !had_all) return fail_all(has_left(rank));
  const auto needs_it = [&](const Active& active) {
    return std::any_of(active.waits_for_ready.begin(), active.waits_for_ready.end(),
                       [&](std::uint32_t task) { return active.operation.plan.tasks[task].peer == rank; });
  };
  bool needed = std::any_of(active_.begin(), active_.end(), [&](const auto& one) { return needs_it(*one.second); });
  for (const auto& [id, transfer] : receives_)
    needed = needed || transfer.active->operation.plan.tasks[transfer.task].peer == rank;
  if (!needed) return;
  fail_all(has_left(rank));
}

// It closes its memory when it has the answer, so that comes when nothing is under way to there.
void Group::answer_goodbyes() {
  for (std::uint32_t rank = 0; rank < size(); ++rank) {
    auto& peer = peers_[rank];
    if (peer.stage != Stage::left || peer.answered) continue;
    const bool under_way = std::any_of(writes_.begin(), writes_.end(), [&](const auto& one) {
      return one.second.active->operation.plan.tasks[one.second.task].peer == rank;
    });
    if (under_way) continue;
    peer.answered = true;
    peer.heard_goodbye = true;  // it needs nothing of this one
    const auto kind = Message::farewell;
    (void)engine_.send(peer.endpoint, bytes_of(kind));  // it may be gone
  }
}

}  // namespace rejoin::collectives
