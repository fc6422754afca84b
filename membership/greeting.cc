#include "membership/greeting.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/deadlines.h"
#include "base/release.h"

namespace rejoin::membership {

proto::NodeHello hello_of(const std::string& node, Duration silence) {
  proto::NodeHello hello;
  Versions().put_into(hello);
  hello.set_release(release());
  hello.set_node(node);
  hello.set_silence_ms(in_ms(silence));
  return hello;
}

Greeting greet(const proto::NodeHello& hello, const std::string& address, Duration silence, bool takes_relays) {
  constexpr std::size_t longest = 100;
  const Versions own, theirs = Versions::of(hello);
  Greeting greeting;
  if (const auto version = agreed(own, theirs)) greeting.spoken.emplace(*version);
  else
    greeting.refusal = why_refused(fmt::format("node {} at {}", printable(hello.node(), longest), address), theirs,
                                   "its coordinator or relay");
  if (greeting.spoken && hello.relay() && !takes_relays) {
    greeting.misplaced = true;
    greeting.spoken.reset();
    greeting.refusal =
        fmt::format("relay {} at {} has come to a relay, or to itself; give it the coordinator's address",
                    printable(hello.node(), longest), address);
  }
  // One that speaks nothing in common with us may know this message nevertheless: it is there since that version.
  if (!Spoken(theirs.newest).may(Feature::welcome)) return greeting;
  auto& welcome = *greeting.answer.emplace().mutable_welcome();
  welcome.set_oldest(own.oldest);
  welcome.set_newest(own.newest);
  welcome.set_release(release());
  welcome.set_refusal(greeting.refusal);
  welcome.set_silence_ms(in_ms(silence));
  return greeting;
}

std::optional<std::string> different_silence(const std::string& who, std::uint64_t its_ms, const std::string& other,
                                             std::uint64_t others_ms) {
  if (its_ms == 0 || others_ms == 0 || its_ms == others_ms) return std::nullopt;
  return fmt::format("{} has --silence-ms {}, and {} {}: give all processes of the job the same", who, its_ms, other,
                     others_ms);
}

std::uint64_t in_ms(Duration silence) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(silence).count());
}

Duration pace_of(const std::string& who, Duration silence, const proto::NodeWelcome& welcome,
                 std::vector<Note>& notes) {
  if (auto line = different_silence(who, in_ms(silence), "who it is connected with", welcome.silence_ms()))
    notes.push_back({std::move(*line), true});
  const bool sooner = welcome.silence_ms() != 0 && welcome.silence_ms() < in_ms(silence);
  return deadlines::kHeartbeatOfDaemon.of(sooner ? std::chrono::milliseconds(welcome.silence_ms()) : silence);
}

}  // namespace rejoin::membership
