// Lines that go to a regular file. Its disk may stand still for seconds, and neither poll() nor O_NONBLOCK helps there;
// who has something to say may be the very thread by whose signs of life others know this process. So a thread of its
// own writes them. See "Log files on disks that stand still" in docs/design-notes.md.
#pragma once

#include <fmt/format.h>
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/clock.h"
#include "base/fd.h"

namespace rejoin {

// Lines of which one may be taken whole, in part, or not at all.
class WholeLines {
 public:
  // `put` writes as much of a text as is taken, removes that from it, and says whether this was all. What stands before
  // `line` says how many were left out, and `why`.
  template <typename Put>
  void say(std::string_view line, std::string_view head, std::string_view why, const Put& put) {
    if (!put(rest_)) return ++left_out_, void();
    std::string text;
    if (left_out_ > 0) text = fmt::format("{}... {} lines were left out, {}\n", head, left_out_, why);
    text += line;
    rest_ = text;
    const bool begun = !put(rest_) && rest_.size() < text.size();
    left_out_ = rest_.empty() || begun ? 0 : left_out_ + 1;
    if (!begun) rest_.clear();
  }
  std::size_t left_out() const { return left_out_; }
  void leave_out(std::size_t lines) { left_out_ += lines; }

 private:
  std::string rest_;  // of a line of which a part is out
  std::size_t left_out_ = 0;
};

// Any thread. Its own begins with the first line.
class LogFile {
 public:
  static constexpr std::size_t kMostWaiting = std::size_t{1} << 20;  // bytes; beyond them lines are left out
  static constexpr auto kPatience = std::chrono::milliseconds(10);
  static constexpr auto kLastPatience = std::chrono::seconds(1);
  using Write = ssize_t (*)(int, const void*, std::size_t);

  explicit LogFile(Write how = &::write) : how_(how) {}
  ~LogFile();  // when all is written
  LogFile(const LogFile&) = delete;

  struct File {
    int descriptor = -1;
    std::uint64_t device = 0, inode = 0;
  };
  // Hands over a line for the file that the descriptor is now, whatever it is later. Returns its number. Nothing: the
  // system gives no thread.
  std::optional<std::uint64_t> put(std::string line, const File& file, bool last_words);
  // Until that line and those before are written, so that they are there for whoever looks next; but for kPatience at
  // most, and not at all behind a line that was not there by then. Last words are worth more patience.
  void wait_for(std::uint64_t number, bool last_words);
  void wait_for_all();  // as for last words

 private:
  struct Line {
    std::string text;
    File of;
    std::shared_ptr<Fd> file;  // another descriptor of it
    std::size_t left_out = 0;  // before this one
  };
  void write();
  bool write(std::string& text, int to) const;

  const Write how_;
  std::mutex mutex_;  // guards all but lines_
  std::condition_variable wake_, done_;
  std::deque<Line> waiting_;
  std::size_t bytes_ = 0;  // of these and of the one that is being written
  std::uint64_t handed_over_ = 0, written_ = 0;
  std::size_t left_out_ = 0;
  bool late_ = false;  // somebody's patience was over
  bool ending_ = false;
  std::thread thread_;
  WholeLines lines_;  // the thread's
};

// Waits as for last words until all lines of this process's log are out. Any thread.
void wait_for_log();

}  // namespace rejoin
