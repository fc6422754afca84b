#include "examples/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/fail.h"
#include "base/fd.h"
#include "examples/text.h"

namespace rejoin::demo {

std::vector<std::uint64_t> positions_of(const std::vector<SampleRange>& batch, std::size_t size) {
  std::vector<std::uint64_t> positions;
  for (const auto& range : batch)
    for (auto sample = range.begin; sample < range.end; ++sample) positions.push_back(position_of(sample, size));
  return positions;
}

double evaluate(const ModelShape& shape, const Views& weights, std::string_view text, std::size_t held_out) {
  constexpr std::size_t windows = 64;
  std::vector<std::vector<float>> memory;
  for (const auto& tensor : weights) memory.emplace_back(tensor.size());
  std::vector<std::uint64_t> positions;
  for (std::size_t i = 0; i < windows; ++i)
    positions.push_back(text.size() - held_out + i * (held_out - kContext - 1) / windows);
  return forward_backward(shape, weights, Views(memory.begin(), memory.end()), text, positions, [](Tensor) {});
}

std::string Directory::checkpoint(std::uint32_t rank) const { return fmt::format("{}/checkpoint.{}", path_, rank); }

Result<Position> Directory::restore(std::uint32_t rank, const std::vector<std::span<std::byte>>& state) const {
  const std::string path = checkpoint(rank);
  if (!std::filesystem::exists(path)) return Position{};
  std::ifstream in(path, std::ios::binary);
  std::string line;
  std::getline(in, line);
  const auto position = Position::from_text(line);
  if (!position) return fail(position.error().code, "{}: {}", path, position.error().message);
  for (auto column : state)
    in.read(reinterpret_cast<char*>(column.data()), static_cast<std::streamsize>(column.size()));
  if (!in || in.peek() != std::ifstream::traits_type::eof())
    return fail(ErrorCode::corrupt, "{} is not of this model's size; remove it, or restore it from a copy", path);
  return position;
}

// On disk as a whole before it takes the old one's place, whoever else writes one at the same time.
Result<> Directory::save(std::uint32_t rank, const Position& position,
                         const std::vector<std::span<std::byte>>& state) const {
  const std::string path = checkpoint(rank), written = fmt::format("{}.{}", path, ::getpid());
  std::ofstream out(written, std::ios::binary);
  out << position.text() << "\n";
  for (auto column : state)
    out.write(reinterpret_cast<const char*>(column.data()), static_cast<std::streamsize>(column.size()));
  if (!out.flush())
    return fail(ErrorCode::io, "can't write {}: {}; the directory has to be there, with room", written,
                std::strerror(errno));
  const Fd file(::open(written.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || ::fsync(file.get()) != 0) return fail_errno(written);
  std::error_code error;
  std::filesystem::rename(written, path, error);
  if (error) return fail(ErrorCode::io, "{} can't become {}: {}", written, path, error.message());
  const Fd directory(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0) return fail_errno(path_);
  return {};
}

std::string Directory::metrics(const SessionConfig& config) const {
  return fmt::format("{}/metrics.{}.{}", path_, config.replica, config.rank);
}

// By doing so: rights alone don't tell it of every file system.
Result<> Directory::check(const SessionConfig& config) const {
  const auto failed = [](const std::string& path) {
    return fail(ErrorCode::invalid_argument,
                "can't write {}: {}; DIRECTORY has to be there, and to let checkpoints and metrics be written", path,
                std::strerror(errno));
  };
  std::string ours = path_ + "/.check.XXXXXX";  // nobody else's, whatever numbers processes have in other containers
  const Fd made(::mkstemp(ours.data()));
  if (!made) return failed(path_);
  ::unlink(ours.c_str());
  const Fd lines(::open(metrics(config).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!lines) return failed(metrics(config));
  return {};
}

Result<> Directory::append_metric(const SessionConfig& config, const Session::Step& step,
                                  const std::string& what) const {
  std::ofstream out(metrics(config), std::ios::app);
  out << "step " << step.number();
  for (const auto& range : step.batch()) out << " samples " << range.begin << " " << range.end;
  out << " " << what << "\n";
  if (!out.flush()) return fail(ErrorCode::io, "can't write {}: {}", metrics(config), std::strerror(errno));
  return {};
}

}  // namespace rejoin::demo
