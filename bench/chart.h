// A line chart as SVG: values from 0 to 1 over a logarithmic axis.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace rejoin::bench {

struct Line {
  std::string name;
  std::vector<double> values;  // one for each of the axis's
};

std::string chart(const std::string& title, const std::string& axis, std::span<const unsigned> along,
                  std::span<const Line> lines);

}  // namespace rejoin::bench
