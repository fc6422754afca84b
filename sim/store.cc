#include "sim/store.h"

#include <fmt/format.h>

#include <utility>

#include "base/fail.h"
#include "sim/world.h"

namespace rejoin::sim {

using namespace std::chrono_literals;
using membership::StoreAnswer;
using membership::StoreRequest;
using Kind = StoreRequest::Kind;
using Answered = StoreAnswer::Outcome;

namespace {

constexpr Duration kDeadline = 15ms;  // of a try
constexpr std::size_t kBefore = 8, kBackups = 40, kEntriesOfARead = 5;

}  // namespace

Store::Store(World& world, Judged judged)
    : world_(world), judged_(judged == Judged::yes), random_(world.chance("store", judged_ ? 0 : 1)) {}

void Store::begin_with(const std::vector<proto::LogRecord>& records) {
  if (records.empty()) return;
  proto::LogEntry entry;
  for (const auto& record : records) *entry.add_records() = record;
  state_.log[0] = std::make_shared<const std::string>(entry.SerializeAsString());
  state_.end = records.size();
}

void Store::clear() {
  state_ = {};
  before_.clear();
  backups_.clear();
  lacks_records_ = false;
  lacked_until_.reset();
  leader_ = {};
  ++generation_;
}

// What is under way is done there. Revisions are given out again.
bool Store::set_back(Random& random, std::uint64_t below) {
  std::erase_if(backups_, [&](const State& one) { return one.end >= below; });
  if (backups_.empty()) return false;
  backups_.resize(1 + random.pick(backups_.size()));
  state_ = backups_.back();
  revision_ = state_.revision;
  before_.clear();
  lacks_records_ = true;
  return true;
}

// An answer of before may be on its way.
bool Store::lacked_records() const {
  return lacks_records_ || (lacked_until_ && world_.now() - *lacked_until_ < kDeadline);
}

void Store::go_away(TimePoint until) { away_until_ = std::max(away_until_, until); }
void Store::cut_off(std::uint32_t coordinator, TimePoint until) {
  cut_until_[coordinator] = std::max(cut_until_[coordinator], until);
}

void Store::take_nothing(TimePoint until, std::optional<std::uint32_t> from) {
  TimePoint& ends = from ? reads_only_until_[*from] : full_until_;
  ends = std::max(ends, until);
}

// One in many answers is lost, and one in many requests is late or lost, without any fault.
void Store::submit(std::uint32_t coordinator, std::uint64_t instance, const StoreRequest& request) {
  const TimePoint now = world_.now(), away = std::max(away_until_, cut_until_[coordinator]);
  const bool late = away > now || random_.one_in(200), lost = late && random_.one_in(2);
  if (!late && request.kind != Kind::read && std::max(full_until_, reads_only_until_[coordinator]) > now)
    return answer_with(instance, random_.of_any_size(50us, 2ms),
                       {.outcome = Answered::unknown, .error = "it takes nothing", .leader = {}});
  // A snapshot takes several transactions.
  Duration until_done = random_.of_any_size(50us, request.kind == Kind::compact ? Duration(40ms) : Duration(2ms));
  if (late) until_done += std::max(away - now, kDeadline) + random_.of_any_size(1us, 2s);
  const bool heard = !late && !random_.one_in(200);
  if (!heard) answer_with(instance, kDeadline, {.outcome = Answered::unknown, .error = "no answer", .leader = {}});
  if (lost) return;
  world_.after(until_done, [this, coordinator, instance, request, heard, late, of = generation_] {
    if (of != generation_) return;
    StoreAnswer answer = execute(coordinator, request, late);
    if (heard) answer_with(instance, random_.of_any_size(50us, 2ms), std::move(answer));
  });
}

void Store::answer_with(std::uint64_t instance, Duration delay, StoreAnswer answer) {
  world_.answer_coordinator(instance, delay, std::move(answer));
}

bool Store::has_led(std::uint64_t instance) const {
  const auto found = led_until_.find(instance);
  return leader_.instance() == instance || (found != led_until_.end() && world_.now() - found->second < kDeadline);
}

StoreAnswer Store::execute(std::uint32_t coordinator, const StoreRequest& request, bool late) {
  if (request.kind == Kind::read) return read(request);
  StoreAnswer answer;
  const State before = state_;
  const bool leads = request.token == state_.leader_revision && request.leader == state_.leader;
  const bool fenced = !leads && !world_.planted(Plant::append_without_comparison);
  const bool has_last = !request.behind.entry ? request.behind.snapshot_revision == 0 ||
                                                    request.behind.snapshot_revision == state_.snapshot_revision
                                              : state_.log.contains(*request.behind.entry);
  bool done = !fenced && (has_last || world_.planted(Plant::append_behind_a_gap));
  if (done) {
    ++revision_;
    switch (request.kind) {
      case Kind::read: break;
      case Kind::claim:
        if (judged_) world_.on_claim(coordinator, leader_, late);
        led_until_[leader_.instance()] = world_.now();
        backups_.clear();
        state_.leader_revision = revision_;
        state_.leader = request.value;
        REJOIN_CHECK(leader_.ParseFromString(request.value), "a claim that can't be read");
        break;
      case Kind::append: done = append(request); break;
      case Kind::renew: state_.alive_revision = revision_; break;
      case Kind::compact: {
        done = request.position > state_.snapshot_position;
        if (!done) break;
        proto::LogRecord taken;
        REJOIN_CHECK(taken.ParseFromString(request.value), "a snapshot that can't be read");
        if (!request.entry.empty()) {
          put_entry(request.entry_at, request.entry);
          if (std::exchange(lacks_records_, false)) lacked_until_ = world_.now();
        }
        if (judged_) world_.compare_with_log(taken, request.position);
        state_.begin = request.whole ? request.position : state_.snapshot_position;
        state_.snapshot_position = request.position;
        state_.snapshot = std::make_shared<const std::string>(request.value);
        state_.snapshot_revision = revision_;
        state_.end = std::max(state_.end, request.position);
        state_.log.erase(state_.log.begin(), state_.log.lower_bound(state_.begin));
        break;
      }
    }
  }
  if (done) {
    state_.revision = revision_;
    before_.push_back(before);
    if (before_.size() > kBefore) before_.pop_front();
    if (request.kind != Kind::claim) backups_.push_back(before);
    if (backups_.size() > kBackups) backups_.pop_front();
  }
  answer.outcome = done ? Answered::done : Answered::refused;
  answer.leader_revision = state_.leader_revision;
  answer.leader = state_.leader;
  if (!done && request.kind == Kind::append)
    if (auto there = state_.log.find(request.position); there != state_.log.end()) answer.existing = *there->second;
  return answer;
}

bool Store::append(const StoreRequest& request) {
  if (state_.log.contains(request.position) && !world_.planted(Plant::append_without_comparison)) return false;
  if (judged_ && request.position > state_.end)
    world_.checker().violate(
        "one-decision", fmt::format("an entry at {} is written, and the log ends at {}", request.position, state_.end));
  put_entry(request.position, request.value);
  return true;
}

void Store::put_entry(std::uint64_t position, const std::string& bytes) {
  proto::LogEntry entry;
  REJOIN_CHECK(entry.ParseFromString(bytes), "an entry that can't be read");
  state_.log[position] = std::make_shared<const std::string>(bytes);
  state_.end = std::max(state_.end, position + static_cast<std::uint64_t>(entry.records_size()));
  // A late repetition of one that has gone into a snapshot is before the log, where nobody reads.
  if (position < state_.begin || !judged_) return;
  for (const auto& record : entry.records()) world_.on_shared_record(position++, record);
}

StoreAnswer Store::read(const StoreRequest& request) {
  const bool old = !request.recent && !before_.empty() && random_.one_in(4);
  const State& from = old ? before_[random_.pick(before_.size())] : state_;
  StoreAnswer answer{
      .outcome = Answered::done, .error = {}, .leader_revision = from.leader_revision, .leader = from.leader};
  answer.alive_revision = from.alive_revision;
  std::uint64_t position = request.position;
  answer.snapshot_position = from.snapshot_position;
  answer.snapshot_revision = from.snapshot_revision;
  if (from.snapshot_position > position && !from.log.contains(position) && !world_.planted(Plant::replay_from_a_gap)) {
    position = from.snapshot_position;
    answer.snapshot = *from.snapshot;
  }
  auto entry = from.log.lower_bound(position);
  for (; entry != from.log.end() && answer.entries.size() < kEntriesOfARead; ++entry) {
    answer.entries.emplace_back(entry->first, *entry->second);
    // As if the reader took what it finds for what it needs.
    if (world_.planted(Plant::replay_from_a_gap) && answer.entries.size() == 1) answer.entries.back().first = position;
  }
  answer.more = entry != from.log.end();
  return answer;
}

}  // namespace rejoin::sim
