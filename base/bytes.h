// Views of bytes, and reading of values out of them with bounds, in the machine's byte order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace rejoin {

using Bytes = std::vector<std::byte>;
using BytesView = std::span<const std::byte>;

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB, GiB = 1024 * MiB;

inline BytesView as_bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }
inline std::string_view as_text(BytesView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

template <typename T>
requires std::is_trivially_copyable_v<T> BytesView bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Takes a T off the front of `bytes`; false (and nothing taken) where too few are left.
template <typename T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] bool take(BytesView& bytes, T& value) {
  if (bytes.size() < sizeof(T)) return false;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes = bytes.subspan(sizeof(T));
  return true;
}

// … and puts one at the end.
template <typename T>
requires std::is_trivially_copyable_v<T>
void put(Bytes& bytes, const T& value) {
  const std::size_t end = bytes.size();
  bytes.resize(end + sizeof value);
  std::memcpy(bytes.data() + end, &value, sizeof value);
}

// True where [offset, offset + length) lies inside [0, size), whatever the numbers.
constexpr bool in_range(std::uint64_t offset, std::uint64_t length, std::uint64_t size) {
  return length <= size && offset <= size - length;
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// `front` and then `rest`.
template <typename T>
requires std::is_trivially_copyable_v<T> Bytes joined(const T& front, BytesView rest) {
  Bytes bytes(sizeof front + rest.size());
  std::memcpy(bytes.data(), &front, sizeof front);
  if (!rest.empty()) std::memcpy(bytes.data() + sizeof front, rest.data(), rest.size());
  return bytes;
}

#pragma GCC visibility push(default)
// The parts between separators, empty ones too: at least one.
std::vector<std::string> split(std::string_view text, char separator);

// "1.5 MiB"
std::string human_bytes(std::uint64_t bytes);

// Text of unknown origin as one line of valid UTF-8: what is no character, or none that prints, becomes a question
// mark, and what is longer than so many bytes is cut behind a whole character.
std::string printable(std::string_view text, std::size_t longest);

#pragma GCC visibility pop

}  // namespace rejoin
