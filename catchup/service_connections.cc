// The service's connections: with sources and other joiners, and from those that are served.
#include <fmt/ranges.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/log.h"
#include "base/refusals.h"
#include "catchup/service.h"

namespace rejoin::catchup {

void Service::connect_missing(RankKey key, LocalRank& rank, TimePoint now) {
  for (const auto& source : rank.wanted) connect(key, rank, source, false, now);
  rank.joiner->set_turn(rank.chain.own, rank.chain.of);
  for (const auto& fellow : rank.chain.fellows) {
    const auto known = rank.given_up.find(fellow);
    const bool waits = known != rank.given_up.end() && (known->second.never || now < known->second.at);
    if (!waits) connect(key, rank, fellow, true, now);
  }
}

void Service::connect(RankKey key, LocalRank& rank, const SourceAddress& source, bool fellow, TimePoint now) {
  if (rank.sources.contains(source)) return;
  const Hello hello{source.job, source.replica.value, key.rank.value, source.incarnation.value,
                    rank.view->manifest().hash()};
  auto endpoint = engine_.connect({source.address.text, secret_}, bytes_of(hello));
  if (!endpoint) return tell_of_loss(rank, source, endpoint.error().message);
  rank.sources[source] = *endpoint;
  fetching_[*endpoint] = {key, source, now, fellow};
}

// A joiner that stands still is tried again later, and later each time; a contributor at once, since it does not take
// the call before it goes on.
void Service::part_from(LocalRank& rank, const GivenUp& from, TimePoint now) {
  const auto found = std::find_if(rank.sources.begin(), rank.sources.end(),
                                  [&](const auto& one) { return one.first.replica == from.source; });
  if (found == rank.sources.end()) return;
  if (fetching_.at(found->second).fellow) {
    auto& retry = rank.given_up[found->first];
    retry.never = retry.never || from.wrong;
    retry.pause = std::clamp<Duration>(2 * retry.pause, deadlines::kStillFellow.of(silence_),
                                       deadlines::kFellowRetry.of(silence_));
    retry.at = now + retry.pause;
  }
  lose(found->second, from.why);
}

// Of a connection that nobody answers, nobody tells.
void Service::give_up_silent_sources(TimePoint now) {
  std::vector<transport::EndpointId> silent;
  for (const auto& [endpoint, from] : fetching_)
    if (from.asked && now - *from.asked > silence_) silent.push_back(endpoint);
  for (auto endpoint : silent) lose(endpoint, fmt::format("no answer for {:.0f} ms", milliseconds(silence_)));
}

void Service::on_accepted(const transport::Event& event) {
  Hello hello{};
  BytesView bytes = event.message;
  const bool known = take(bytes, hello);
  const RankKey key{ReplicaId(hello.replica), RankId(hello.rank)};
  auto found = known ? ranks_.find(key) : ranks_.end();
  using refusals::Why;
  const auto [why, refusal] =
      !known                  ? std::pair{Why::protocol, "it does not say whose state it wants"}
      : found == ranks_.end() ? std::pair{Why::absent, "its trainer is not here, or gives no sign of life"}
      : found->second.serves && found->second.job != hello.job  ? std::pair{Why::job, "it is of another job"}
      : !found->second.registered                               ? std::pair{Why::absent, "its memory is not registered"}
      : found->second.view->manifest().hash() != hello.manifest ? std::pair{Why::declaration, "another state"}
                                                                : std::pair{Why{}, nullptr};
  if (refusal != nullptr) {
    refusals::count(why);
    if (const auto left_out = refusals_.may_say(clock_.now()))
      logger().warn("a connection to catch up{} was refused: {} ({} others were since the last such line)",
                    known ? fmt::format(" from replica {} rank {}", hello.replica, hello.rank) : "", refusal,
                    *left_out);
    return engine_.close(event.endpoint);
  }
  // It comes again, if it knows something newer than we do; otherwise it hears of the newer soon.
  if (found->second.serves != Incarnation(hello.incarnation)) return engine_.close(event.endpoint);
  LocalRank& rank = found->second;
  serving_[event.endpoint] = {
      key, std::make_unique<Source>(engine_, event.endpoint,
                                    Source::Memory{rank.view.get(), rank.state, rank.shadow, &rank.proofs},
                                    compression_, pacer_, clock_, silence_)};
}

void Service::lose(transport::EndpointId endpoint, const std::string& why) {
  engine_.close(endpoint);  // the fence, before anyone else is asked for the same slices
  if (auto serving = serving_.extract(endpoint); !serving.empty()) {
    served_by_gone_ += serving.mapped().source->stats().bytes;
    const auto passed_on = serving.mapped().source->stats().passed_on;
    passed_on_by_gone_ += passed_on;
    if (auto rank = ranks_.find(serving.mapped().rank); rank != ranks_.end())
      rank->second.passed_on_to_gone += passed_on;
    return;
  }
  auto fetching = fetching_.extract(endpoint);
  if (fetching.empty()) return;
  const auto& [key, source, asked, fellow] = fetching.mapped();
  LocalRank& rank = ranks_.at(key);
  tell_of_loss(rank, source, why);
  rank.sources.erase(source);
  if (rank.joiner) rank.joiner->on_source_down(source.replica);
}

void Service::tell_of_loss(LocalRank& rank, const SourceAddress& source, const std::string& why) {
  if (rank.wanted.contains(source)) rank.lost_why[source] = why;
  constexpr std::size_t most = 1024;  // as many replicas as a job can have
  if (losses_.size() >= most && !losses_.contains(source)) losses_.clear();
  const auto left_out = losses_.try_emplace(source, kSameLineAgain).first->second.may_say(clock_.now());
  if (!left_out) return;
  logger().info("catch-up source replica {} is out: {}{}", source.replica, why,
                *left_out > 0 ? fmt::format(" (and {} times more since it was logged last)", *left_out) : "");
}

// Of the first sources; what keeps a joiner from them is most often one thing.
std::string Service::why_unreached(const LocalRank& rank, TimePoint now) {
  constexpr std::size_t most = 3, longest = 160;
  const auto since = rank.joiner ? rank.joiner->unreached_since(now) : std::nullopt;
  if (!since) return {};
  std::vector<std::string> lines;
  for (const auto& source : rank.wanted) {
    if (lines.size() == most) break;
    const auto why = rank.lost_why.find(source);
    lines.push_back(fmt::format("replica {} at {}: {}", source.replica, printable(source.address.text, longest),
                                why == rank.lost_why.end() ? "no answer yet" : printable(why->second, longest)));
  }
  const std::size_t others = rank.wanted.size() - lines.size();
  return fmt::format("it has reached none of its sources for {:.0f} s: {}{}", seconds(now - *since),
                     fmt::join(lines, "; "), others > 0 ? fmt::format("; and {} others", others) : "");
}

void Service::tell_of_unreached(RankKey key, LocalRank& rank, TimePoint now) {
  if (!rank.joiner->unreached_since(now) || !rank.unreached_told.may_say(now)) return;
  logger().warn("replica {} rank {} can't catch up: {}", key.replica, key.rank, why_unreached(rank, now));
}

}  // namespace rejoin::catchup
