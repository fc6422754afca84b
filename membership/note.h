// A line for the log, and whether an operator should read it unasked.
#pragma once

#include <string>

namespace rejoin::membership {

struct Note {
  std::string text;
  bool warning = false;  // something was lost or refused, waits for somebody, or is not as it should be
  std::string like{};    // unless empty: lines that have the same here are alike, whatever numbers are in them
};

}  // namespace rejoin::membership
