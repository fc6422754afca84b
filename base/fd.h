// Owners of what the kernel gives out: descriptors and mappings.
// See "Standard descriptors" in docs/design-notes.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/result.h"

namespace rejoin {

class Fd {
 public:
  Fd() = default;
  // Takes over `fd`, or, in the place of a standard descriptor, another one of the same. None (with errno) where there
  // is none.
  explicit Fd(int fd);
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

// Opens /dev/null, or where that can't be a file that can neither be read nor written, in the place of each standard
// descriptor that is closed: whatever is opened next would be taken for it. Any thread.
void open_standard_descriptors();
Result<Fd> duplicate(int fd);  // another descriptor of the same, closed on exec
Result<Fd> make_eventfd();
Result<Fd> make_pidfd(int pid);
// After a try to accept somebody, by errno: whether there was no descriptor, or no memory for a socket. The kernel
// keeps who waits, and would say so at once, for ever: it is to be tried again after a while, by when one may have
// become free.
bool without_descriptors(int error);
constexpr auto kWithoutDescriptors = std::chrono::milliseconds(100);
void signal_eventfd(const Fd& fd);  // adds one; never blocks
void drain_eventfd(const Fd& fd);

// A mapping of `size` bytes.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        file_(std::move(other.file_)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping() { reset(); }
  static Result<Mapping> of(const Fd& fd, std::size_t size, bool writable = true);
  static Result<Mapping> anonymous(std::size_t size);  // private memory, page-aligned and zero
  // The same of a sealed memfd: other processes can map it, and copy out of it faster than out of private memory.
  static Result<Mapping> shareable(std::size_t size);
  // The same of a memfd that another process has sealed. Of few bytes, or without a descriptor to spare, it is of().
  static Result<Mapping> shareable_of(const Fd& fd, std::size_t size);
  std::byte* data() const { return base_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() const { return {base_, size_}; }

 private:
  Mapping(std::byte* base, std::size_t size) : base_(base), size_(size) {}
  void reset();
  Result<> share(Fd file);
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  Fd file_;  // of a shareable one
};

// The sealed memfd that this memory lies in, where a Mapping of it is shareable. Any thread.
struct SharedFile {
  int fd = -1;  // the mapping's
  std::uint64_t inode = 0, offset = 0;
  std::uint64_t size = 0;  // of the mapping
};
std::optional<SharedFile> shared_file_of(std::span<const std::byte> memory);

// A memfd of fixed size, sealed against growing and shrinking, so that nobody who maps it can be made to fault.
Result<Fd> make_sealed_memfd(const std::string& name, std::size_t size);
// Whether `fd` is such a memfd; its size, or why not.
Result<std::size_t> sealed_size(const Fd& fd);

}  // namespace rejoin
