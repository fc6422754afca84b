// How a listener of the control protocol takes a NodeHello: the coordinator and each relay.
#pragma once

#include <optional>
#include <string>

#include "control.pb.h"
#include "membership/versions.h"

namespace rejoin::membership {

struct Greeting {
  std::optional<Spoken> spoken;         // with this node; nothing: it is refused
  std::string refusal;                  // … and this is why
  std::optional<proto::ToNode> answer;  // where it can hear one
};
// `address`: where it calls from.
Greeting greet(const proto::NodeHello& hello, const std::string& address);

}  // namespace rejoin::membership
