// What a person sees: the live view, the loss curve, the timeline and the proof.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "examples/demo_story.h"

namespace rejoin::demo {

class LiveView {
 public:
  // On a terminal the view is redrawn in place; elsewhere a line is written for each change of roles.
  LiveView(const JobSettings& settings, bool quiet);
  void draw(const Story& story);
  void end();

 private:
  const JobSettings settings_;
  const bool quiet_, terminal_;
  int lines_ = 0;
  std::string last_roles_;
};

std::string loss_curve(const Story& story, int width, int height);
std::string summary(const nlohmann::json& report);

}  // namespace rejoin::demo
