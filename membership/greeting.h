// How nodes introduce themselves in the control protocol, and how its listeners, the coordinator and each relay, take
// that.
#pragma once

#include <optional>
#include <string>

#include "control.pb.h"
#include "membership/versions.h"

namespace rejoin::membership {

proto::NodeHello hello_of(const std::string& node);

struct Greeting {
  std::optional<Spoken> spoken;         // with this node; nothing: it is refused
  std::string refusal;                  // … and this is why
  std::optional<proto::ToNode> answer;  // where it can hear one
};
// `address`: where it calls from.
Greeting greet(const proto::NodeHello& hello, const std::string& address);

}  // namespace rejoin::membership
