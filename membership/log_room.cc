// The room that a decision log has behind what is written, so that most appends leave its size as it is.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "membership/log.h"

namespace rejoin::membership {

namespace {

constexpr std::size_t kRoom = 256 * KiB;     // some thousand steps of a small job, some ten of the largest
constexpr std::uint64_t kPlenty = 64 * MiB;  // a snapshot is smaller, and others write there, too

}  // namespace

// Zeros are written, since blocks that are only set aside would have to be entered in the journal when they are used.
// Where there is no room, appends make the file longer, and take more time. None is made where a compaction may need
// what is left. Where a file system says that it is full at the sync only (over a network, say), that append fails, as
// one that makes the file longer would soon.
void Log::make_room(std::uint64_t at) const {
  if (disk_.free && disk_.free(file_.get()) < kPlenty) return;
  static const Bytes zeros(kRoom);
  (void)disk_.write(file_.get(), zeros.data(), zeros.size(), static_cast<off_t>(at));
}

Log::~Log() {
  if (!file_ || failed_ || tail_.empty()) return;  // without a tail it has not been read as sound
  if (tail_is_there()) give_room_back();
}

// Where what is behind the last mark is nothing but room. An operator may have put a longer log here that begins as
// this one does.
void Log::give_room_back() const {
  const std::uint64_t from = end_ + kMarkBytes, size = file_size().value_or(0);
  if (size <= from || size - from > kRoom) return;
  Bytes room(size - from);
  const ssize_t read = ::pread(file_.get(), room.data(), room.size(), static_cast<off_t>(from));
  if (read == static_cast<ssize_t>(room.size()) &&
      std::ranges::all_of(room, [](std::byte one) { return one == std::byte{}; }))
    (void)::ftruncate(file_.get(), static_cast<off_t>(from));
}

}  // namespace rejoin::membership
