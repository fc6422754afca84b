#include "base/sys_files.h"

#include <algorithm>
#include <charconv>
#include <fstream>

#include "base/bytes.h"

namespace rejoin::sys_files {

namespace fs = std::filesystem;

std::string line_in(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

double number_in(const fs::path& file) {
  const std::string line = line_in(file);
  double value = 0;
  std::from_chars(line.data(), line.data() + line.size(), value);
  return value;
}

std::vector<fs::path> sorted_entries(const fs::path& directory) {
  std::error_code none;
  std::vector<fs::path> all;
  for (fs::directory_iterator at(directory, none), end; !none && at != end; at.increment(none))
    all.push_back(at->path());
  std::ranges::sort(all);
  return all;
}

std::vector<std::size_t> numbers_in(std::string_view list, std::size_t most) {
  std::vector<std::size_t> all;
  for (const auto& range : split(list, ',')) {
    std::size_t first = 0;
    const char* end = range.data() + range.size();
    const auto read = std::from_chars(range.data(), end, first);
    if (read.ec != std::errc()) continue;
    std::size_t last = first;
    if (read.ptr != end) std::from_chars(read.ptr + 1, end, last);
    for (auto number = first; number <= std::min(last, most); ++number) all.push_back(number);
  }
  return all;
}

std::optional<int> numa_node(const fs::path& device) {
  const std::string node = line_in(device / "numa_node");
  int number = 0;
  const auto read = std::from_chars(node.data(), node.data() + node.size(), number);
  return read.ec == std::errc() && number >= 0 ? std::optional(number) : std::nullopt;
}

std::string cpus_of(const fs::path& sys, int node) {
  return line_in(sys / "devices/system/node" / ("node" + std::to_string(node)) / "cpulist");
}

std::size_t numa_nodes(const fs::path& sys) {
  const auto all = sorted_entries(sys / "devices/system/node");
  return static_cast<std::size_t>(
      std::ranges::count_if(all, [](const fs::path& node) { return !line_in(node / "cpulist").empty(); }));
}

}  // namespace rejoin::sys_files
