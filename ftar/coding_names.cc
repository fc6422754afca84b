// The setting, by its name.
#include "base/fail.h"
#include "ftar/coding.h"

namespace rejoin::ftar {

Result<Coding> coding_named(std::string_view name) {
  for (const Coding one : {Coding::off, Coding::automatic, Coding::eight, Coding::four})
    if (name == to_string(one)) return one;
  return fail(ErrorCode::invalid_argument, "coding '{}' is none of off, auto, 8 and 4", name);
}

std::string_view to_string(Coding coding) {
  switch (coding) {
    case Coding::off: return "off";
    case Coding::automatic: return "auto";
    case Coding::eight: return "8";
    case Coding::four: return "4";
  }
  return "?";
}

}  // namespace rejoin::ftar
