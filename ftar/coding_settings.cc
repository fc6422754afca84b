// The setting, by its name, and what the automatic one goes by: how fast this CPU codes.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

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

namespace coding {

double rate() {
  static const double measured = [] {
    constexpr std::size_t count = 64 * 1024, bytes = count * sizeof(float);
    std::vector<std::byte> own(bytes), feedback(bytes), coded(bytes);
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 1009) - 504.0f;
    std::memcpy(own.data(), values.data(), bytes);
    double best = 0;
    for (int turn = 0; turn < 5; ++turn) {
      const auto before = std::chrono::steady_clock::now();
      run({.count = count,
           .own = own.data(),
           .feedback = feedback.data(),
           .residual = feedback.data(),
           .width = Width::eight,
           .coded = coded.data()});
      decode(DataType::float32, Width::eight, own.data(), coded.data(), count);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
      best = std::max(best, static_cast<double>(bytes) / took.count());
    }
    return best;
  }();
  return measured;
}

}  // namespace coding
}  // namespace rejoin::ftar
