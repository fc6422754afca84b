#include "bench/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace rejoin::bench {

namespace {

constexpr double kLeft = 60, kTop = 50, kWidth = 640, kHeight = 320, kLegend = 130, kHighest = 1.1;
constexpr const char* kColours[] = {"#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb"};

double y_of(double value) { return kTop + kHeight * (1 - std::min(value, kHighest) / kHighest); }

std::string text(double x, double y, const char* anchor, const std::string& what) {
  return fmt::format("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, what);
}

}  // namespace

std::string chart(const std::string& title, const std::string& axis, std::span<const unsigned> along,
                  std::span<const Line> lines) {
  const auto [least, most] = std::minmax_element(along.begin(), along.end());
  const double low = std::log2(*least), span = std::max(std::log2(*most) - low, 1.0);
  const auto x_of = [&](unsigned at) { return kLeft + kWidth * (std::log2(at) - low) / span; };
  const double width = kLeft + kWidth + kLegend, height = kTop + kHeight + 60;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      width, height);
  svg += text(kLeft, 24, "start", title);
  for (int tenth = 0; tenth <= 10; tenth += 2) {
    const double y = y_of(tenth / 10.0);
    svg += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\"/>\n", kLeft, kLeft + kWidth,
                       y, y, tenth == 10 ? "#555" : "#ddd");
    svg += text(kLeft - 8, y + 4, "end", fmt::format("{:.1f}", tenth / 10.0));
  }
  for (const unsigned at : along) svg += text(x_of(at), kTop + kHeight + 18, "middle", std::to_string(at));
  svg += text(kLeft + kWidth / 2, kTop + kHeight + 42, "middle", axis);
  for (std::size_t l = 0; l < lines.size(); ++l) {
    const char* colour = kColours[l % std::size(kColours)];
    std::string points;
    for (std::size_t i = 0; i < along.size(); ++i)
      points += fmt::format("{:.1f},{:.1f} ", x_of(along[i]), y_of(lines[l].values[i]));
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", points, colour);
    svg += fmt::format("<g fill=\"{}\">{}</g>\n", colour,
                       text(kLeft + kWidth + 12, kTop + 12 + 18 * static_cast<double>(l), "start", lines[l].name));
  }
  return svg + "</svg>\n";
}

}  // namespace rejoin::bench
