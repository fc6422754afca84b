// How nodes introduce themselves in the control protocol, and how its listeners, the coordinator and each relay, take
// that.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control.pb.h"
#include "membership/note.h"
#include "membership/versions.h"

namespace rejoin::membership {

proto::NodeHello hello_of(const std::string& node, Duration silence = {});

struct Greeting {
  std::optional<Spoken> spoken;         // with this node; nothing: it is refused
  std::string refusal;                  // … and this is why
  bool misplaced = false;               // … though the two speak with each other: it is a relay behind a relay
  std::optional<proto::ToNode> answer;  // where it can hear one
};
// `address`: where it calls from. A relay does not take relays: they may lead to each other, or one to itself, and what
// is said to one of them would go round for ever.
Greeting greet(const proto::NodeHello& hello, const std::string& address, Duration silence = {},
               bool takes_relays = true);

// Where both have told their --silence-ms, and not the same: a sentence. All of a job's processes are to have the same.
std::optional<std::string> different_silence(const std::string& who, std::uint64_t its_ms, const std::string& other,
                                             std::uint64_t others_ms);

// As it stands in both messages.
std::uint64_t in_ms(Duration silence);
// How often who has been told that sends heartbeats: so that neither end finds it silent. A note where the two differ.
Duration pace_of(const std::string& who, Duration silence, const proto::NodeWelcome& welcome, std::vector<Note>& notes);

}  // namespace rejoin::membership
