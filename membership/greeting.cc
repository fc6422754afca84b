#include "membership/greeting.h"

#include <fmt/format.h>

#include "base/bytes.h"
#include "base/release.h"

namespace rejoin::membership {

proto::NodeHello hello_of(const std::string& node) {
  proto::NodeHello hello;
  Versions().put_into(hello);
  hello.set_release(release());
  hello.set_node(node);
  return hello;
}

Greeting greet(const proto::NodeHello& hello, const std::string& address) {
  constexpr std::size_t longest = 100;
  const Versions own, theirs = Versions::of(hello);
  Greeting greeting;
  if (const auto version = agreed(own, theirs)) greeting.spoken.emplace(*version);
  else
    greeting.refusal = why_refused(fmt::format("node {} at {}", printable(hello.node(), longest), address), theirs,
                                   "its coordinator or relay");
  // One that speaks nothing in common with us may know this message nevertheless: it is there since that version.
  if (!Spoken(theirs.newest).may(Feature::welcome)) return greeting;
  auto& welcome = *greeting.answer.emplace().mutable_welcome();
  welcome.set_oldest(own.oldest);
  welcome.set_newest(own.newest);
  welcome.set_release(release());
  welcome.set_refusal(greeting.refusal);
  return greeting;
}

}  // namespace rejoin::membership
