// What a joiner has is verified: its digests are compared with those of all sources, slice by slice.
#include <algorithm>

#include "base/digest.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "catchup/joiner.h"

namespace rejoin::catchup {

namespace {

constexpr std::size_t kQuestions = 2;                       // queries under way
constexpr std::uint32_t kPartsAsked = local::kMaxPins / 4;  // of one query, so that two leave room for the stream

constexpr std::size_t kLookedAt = 256;  // slices, for one question

constexpr int kSuspected = 4;  // differences from one source, until it is believed without the others' digests

}  // namespace

// Whether this source has yet to say what it has of a slice.
bool Joiner::asks(const Expected& source, std::uint32_t slice) const {
  return !source.agrees[slice] || suspects_.contains(slice);  // suspects are compared among all at one version
}

// Up to which version this replica has come.
std::uint64_t Joiner::reached(const local::Clock& clock) const {
  return std::max(foreign_ ? 0 : clock.version, oldest_);
}

// The latest version that a source can have while this trainer makes its steps: the others wait for it in the next one.
// One is added for good measure. What is said to be newer waits for the trainer: it may stand, and the others go on
// without it. Where it makes a step and a slice is still too new, that was not true.
std::uint64_t Joiner::newest(const local::Clock& clock) const { return std::max(clock.version, oldest_) + 2; }

// At which version the slice's bytes are now, if that will do: the state's, or the one that it has arrived in and from
// which the next update goes on. One that is behind the state has kept gradients, and is compared with them.
std::optional<std::uint64_t> Joiner::comparable_at(std::uint32_t slice, const local::Clock& clock) const {
  const auto status = view_.slice(slice);
  const bool is_there = status.state == local::SliceState::current   ? status.version() == clock.version
                        : status.state == local::SliceState::arrived ? status.version() >= clock.version
                                                                     : false;
  const bool will_do = is_there && status.version() >= oldest_ && status.version() <= newest(clock);
  return will_do ? std::optional(status.version()) : std::nullopt;
}

// About some of these slices, from `up_to` on.
void Joiner::request_verification(const std::set<std::uint32_t>& among, std::uint32_t& up_to) {
  if (questions_.size() >= kQuestions || sources_.empty()) return;
  const local::Clock clock = view_.clock();
  if (clock.updating) return;
  Question question;
  std::vector<std::uint32_t> parts;
  for (std::size_t looked_at = 0; looked_at < std::min(kLookedAt, among.size()); ++looked_at) {
    auto next = among.upper_bound(up_to);
    if (next == among.end()) next = among.begin();
    const std::uint32_t i = *next;
    const auto& slice = view_.manifest().slices()[i];
    if (!parts.empty() && parts.size() + slice.parts > kPartsAsked) break;
    up_to = i;
    const auto version = comparable_at(i, clock);
    const bool asked = std::any_of(questions_.begin(), questions_.end(), [&](const Question& q) {
      return std::find(q.slices.begin(), q.slices.end(), i) != q.slices.end();
    });
    if (asked || !version || (!parts.empty() && *version != question.version)) continue;
    if (auto suspect = suspects_.find(i); suspect != suspects_.end() && now_ < suspect->second.again_at) continue;
    bool any = false;
    for (const auto& [source, known] : expected_) {
      if (!sources_.contains(source) || known.stood_still || *version < known.at_least || !asks(known, i)) continue;
      question.asked[source].which.push_back(question.slices.size());
      any = true;
    }
    if (!any) continue;
    question.version = *version;
    question.slices.push_back(i);
    for (std::uint32_t p = 0; p < slice.parts; ++p) parts.push_back(slice.first_part + p);
  }
  if (parts.empty()) return;
  auto pinned = view_.pin(parts);
  if (!pinned) return;
  question.pinned = std::move(pinned->second);
  question.ours.resize(question.pinned.size());
  if (pinned->first != clock.version) return drop(question);  // an update came and went
  for (std::size_t i = 0, part = 0; i < question.slices.size(); ++i) {
    const auto* known = arrived_.at(question.slices[i], question.version);
    for (std::uint32_t p = 0; p < view_.manifest().slices()[question.slices[i]].parts; ++p, ++part) {
      if (known == nullptr) continue;
      view_.release(question.pinned[part]);
      question.ours[part] = (*known)[p];
    }
  }
  question.number = next_question_++;
  std::vector<std::pair<transport::EndpointId, proto::Stream>> messages;
  for (const auto& [source, asked] : question.asked) {
    auto& verify = *messages.emplace_back(sources_.at(source).endpoint, proto::Stream()).second.mutable_verify();
    verify.set_request(question.number);
    verify.set_version(question.version);
    for (auto which : asked.which) verify.add_slices(question.slices[which]);
  }
  questions_.push_back(std::move(question));
  for (const auto& [endpoint, message] : messages)
    (void)send(endpoint, message);  // a failed connection ends in on_source_down, which waits for it no longer
}

Result<> Joiner::on_verify_reply(ReplicaId source, const proto::VerifyReply& reply) {
  auto found = std::find_if(questions_.begin(), questions_.end(),
                            [&](const Question& q) { return q.number == reply.request() && q.asked.contains(source); });
  if (found == questions_.end()) return {};
  Asked& asked = found->asked.at(source);
  if (asked.over) return {};
  if (!reply.too_late() && static_cast<std::size_t>(reply.digests().size()) != asked.which.size())
    return fail(ErrorCode::corrupt, "a source sent {} slices of {}", reply.digests().size(), asked.which.size());
  asked.over = true;
  if (auto known = expected_.find(source); reply.too_late() && known != expected_.end())
    known->second.at_least = std::max(known->second.at_least, found->version + 1);
  if (!reply.too_late()) asked.theirs.assign(reply.digests().begin(), reply.digests().end());
  return {};
}

// True when the question is over.
bool Joiner::settle(Question& question) {
  const bool heard =
      std::all_of(question.asked.begin(), question.asked.end(), [](const auto& a) { return a.second.over; });
  if (!settle_pins(view_, question.pinned, question.ours) || !heard) return false;
  std::vector<std::map<ReplicaId, std::uint64_t>> theirs(question.slices.size());
  for (const auto& [source, asked] : question.asked)
    for (std::size_t i = 0; i < asked.theirs.size(); ++i) theirs[asked.which[i]][source] = asked.theirs[i];
  std::size_t part = 0;
  for (std::size_t i = 0; i < question.slices.size(); ++i) {
    std::uint64_t ours = 0;
    for (std::uint32_t p = 0; p < view_.manifest().slices()[question.slices[i]].parts; ++p)
      ours = combine_digests(ours, *question.ours[part++]);
    if (unverified_.contains(question.slices[i])) settle_slice(question.slices[i], question.version, ours, theirs[i]);
  }
  return true;
}

// What sources have of a slice at one version, and this replica.
void Joiner::settle_slice(std::uint32_t slice, std::uint64_t version, std::uint64_t ours,
                          const std::map<ReplicaId, std::uint64_t>& theirs) {
  if (theirs.empty()) return;  // all were past that version
  const auto differs = [&](const auto& one) { return one.second != theirs.begin()->second; };
  if (std::any_of(theirs.begin(), theirs.end(), differs)) return report_drift(slice, version, theirs);
  const auto able = static_cast<std::size_t>(
      std::ranges::count_if(sources_, [&](const auto& source) { return !stands_still(source.first); }));
  if (theirs.begin()->second == ours) {
    if (theirs.size() >= able) suspects_.erase(slice);  // all agree, at one version
    for (const auto& [source, digest] : theirs) agree(source, slice);
    return;
  }
  // Either this replica's bytes are wrong, or those of the sources that agreed with them before: all must say at one
  // version, if they can.
  doubt(slice);
  Suspect& suspect = suspects_[slice];
  if (theirs.size() < able && ++suspect.times < kSuspected) return;
  if (const auto left_out = differs_told_.may_say(now_))
    logger().warn(
        "slice {} differs from replica {}'s at version {}; it is fetched again ({} others did since the last "
        "such line)",
        slice, theirs.begin()->first, version, *left_out);
  sent_wrong(slice, std::nullopt);
  fetch_again(slice);
}

// Fetched again from one, it would fit that one. So it waits until it is known who is wrong. One slice at a time is
// enough to find that out, however many differ.
void Joiner::report_drift(std::uint32_t slice, std::uint64_t version,
                          const std::map<ReplicaId, std::uint64_t>& theirs) {
  doubt(slice);
  suspects_[slice].again_at = now_ + kDisputed;
  const auto left_out = drifts_told_.may_say(now_);
  if (!left_out) return;
  const auto& manifest = view_.manifest();
  const local::Slice& what = manifest.slices()[slice];
  Drift drift{.tensor = manifest.tensors()[what.range.tensor].name,
              .first = what.range.first,
              .count = what.range.count,
              .version = version,
              .digests = {theirs.begin(), theirs.end()}};
  for (std::uint32_t i = 0; i < manifest.parts().size(); ++i) {
    if (i < what.first_part) drift.offset += manifest.length(manifest.parts()[i], 0);
    drift.total += manifest.length(manifest.parts()[i], 0);
  }
  logger().error("the sources of this state differ at version {} in tensor '{}', elements {} to {}{}", version,
                 drift.tensor, drift.first, drift.first + drift.count,
                 *left_out > 0 ? fmt::format(" (and {} times more since it was logged last)", *left_out) : "");
  drifts_.push_back(std::move(drift));
}

void Joiner::agree(ReplicaId source, std::uint32_t slice) {
  auto known = expected_.find(source);
  if (known == expected_.end()) return;
  known->second.agrees[slice] = true;
  prove(slice);
  if (all_agree(slice)) set_verified(slice, true);
}

// A contributor has the same bytes: they may be passed on, unless sources differ.
void Joiner::prove(std::uint32_t slice) {
  if (suspects_.contains(slice)) return;
  proofs_.add(slice);
  unproven_.erase(slice);
  came_from_.erase(slice);
}

void Joiner::doubt(std::uint32_t slice) {
  proofs_.withdraw(slice);
  if (unverified_.contains(slice)) unproven_.insert(slice);
}

// Whoever is waited for has the same bytes, and at least one has.
bool Joiner::all_agree(std::uint32_t slice) const {
  if (suspects_.contains(slice)) return false;
  bool any = false;
  for (const auto& [source, known] : expected_) {
    if (waited_for(known) && !known.agrees[slice]) return false;
    any = any || known.agrees[slice];
  }
  return any;
}

void Joiner::set_verified(std::uint32_t slice, bool verified) {
  if (verified == verified_[slice]) return;
  verified_[slice] = verified;
  if (verified) events::record(events::Kind::slice_verified, {.a = slice});
  if (verified) ++verified_count_, unverified_.erase(slice), arrived_.forget(slice);
  else --verified_count_, unverified_.insert(slice);
}

// Whose digests are needed has changed.
void Joiner::recheck_verified() {
  if (done_) return;
  for (std::uint32_t i = 0; i < verified_.size(); ++i)
    if (planner_.has(i)) set_verified(i, all_agree(i));
}

void Joiner::drop(Question& question) {
  for (std::size_t i = 0; i < question.pinned.size(); ++i)
    if (!question.ours[i]) view_.release(question.pinned[i]);
  question.pinned.clear();
}

}  // namespace rejoin::catchup
