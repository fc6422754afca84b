#include "daemon/recording.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "base/fail.h"
#include "base/fd.h"
#include "base/flight.h"
#include "base/flight_ring.h"

namespace rejoin::daemon {

namespace {

constexpr std::size_t kMostBytes = 256 * MiB;  // of one file
constexpr std::size_t kMostFiles = 65536;
constexpr std::uint64_t kNoTime = std::uint64_t{1} << 61;  // ns: sums of a few times that are less don't overflow

std::string text_in(std::span<const char> field) {
  return printable(std::string(field.data(), ::strnlen(field.data(), field.size())), field.size());
}

// One ring of a file, as far as it is there.
class RingReader {
 public:
  RingReader(BytesView bytes, std::uint64_t slots, std::uint64_t written)
      : bytes_(bytes), slots_(slots), first_(written - std::min(written, slots)), written_(written) {}

  void read(Recording& into) const {
    for (std::uint64_t index = first_; index < written_; ++index) {
      flight::Slot slot;
      const Found found = at(index, slot);
      if (found == Found::missing) ++into.missing;
      if (found == Found::damaged) ++into.damaged;
      if (found != Found::whole || kind_of(slot) == events::Kind::text) continue;
      if (slot[1] >= kNoTime) continue;
      RecordedEvent event{.at = static_cast<std::int64_t>(slot[1]),
                          .kind = kind_of(slot),
                          .numbers = {.epoch = slot[4],
                                      .step = slot[5],
                                      .replica = static_cast<std::uint32_t>(slot[3]),
                                      .number = static_cast<std::uint32_t>(slot[3] >> 32),
                                      .a = slot[6],
                                      .b = slot[7]}};
      read_text(index, (slot[2] >> 16) & 0xff, event);
      into.events.push_back(std::move(event));
    }
  }
  bool overwritten() const { return first_ > 0; }

 private:
  enum class Found : std::uint8_t { whole, damaged, missing };
  static events::Kind kind_of(const flight::Slot& slot) { return static_cast<events::Kind>(slot[2] & 0xffff); }

  Found at(std::uint64_t index, flight::Slot& slot) const {
    const std::size_t offset = (index % slots_) * flight::kSlotBytes;
    if (index >= written_ || offset + flight::kSlotBytes > bytes_.size()) return Found::missing;
    std::memcpy(slot.data(), bytes_.data() + offset, flight::kSlotBytes);
    const bool whole = slot[0] == index + 1 && slot[2] >> 32 == flight::checksum(slot);
    return whole ? Found::whole : Found::damaged;
  }

  void read_text(std::uint64_t index, std::size_t text_slots, RecordedEvent& into) const {
    std::string all;
    flight::Slot slot;
    for (std::size_t i = 0; i < text_slots; ++i) {
      into.cut = at(++index, slot) != Found::whole || kind_of(slot) != events::Kind::text;
      if (into.cut) break;
      const std::uint64_t words[] = {slot[1], slot[3], slot[4], slot[5], slot[6], slot[7]};
      const std::size_t length = std::min<std::size_t>((slot[2] >> 16) & 0xff, sizeof words);
      all.append(reinterpret_cast<const char*>(words), length);
    }
    // Processes of earlier versions cut the members as they do any other text.
    into.cut |= all.size() == flight::kMostText || all.size() == flight::kMostMembersText;
    const auto line = all.find('\n');  // between two texts
    into.text = printable(all.substr(0, line), all.size());
    if (line == std::string::npos) return;
    into.cut = false;
    into.text += "\n" + printable(all.substr(line + 1), all.size());
  }

  BytesView bytes_;
  std::uint64_t slots_, first_, written_;
};

}  // namespace

std::string Recording::name() const { return fmt::format("{}, process {} on {}", who, pid, host); }

std::int64_t last_event(const Recording& recording) {
  return recording.events.empty() ? recording.opened_ns : recording.events.back().at;
}

Result<Recording> parse_recording(BytesView bytes, const std::string& file) {
  flight::Header header{};
  if (bytes.size() < sizeof header) return fail(ErrorCode::corrupt, "{} is no flight recording: it is too short", file);
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != flight::kMagic) return fail(ErrorCode::corrupt, "{} is no flight recording", file);
  if (header.version != flight::kVersion || header.header_bytes != flight::kHeaderBytes)
    return fail(ErrorCode::corrupt, "{} is a flight recording of version {}, this program reads version {}", file,
                header.version, flight::kVersion);
  Recording recording{.file = file,
                      .who = text_in(header.who),
                      .host = text_in(header.host),
                      .pid = header.pid,
                      .clock = header.clock,
                      .job = header.job,
                      .opened_ns = header.opened_ns,
                      .opened_wall_ns = header.opened_wall_ns};
  if (static_cast<std::uint64_t>(header.opened_ns) >= kNoTime ||
      static_cast<std::uint64_t>(header.opened_wall_ns) >= kNoTime)
    return fail(ErrorCode::corrupt, "{} is damaged: it was opened at no time", file);
  std::size_t offset = flight::kHeaderBytes;
  for (std::size_t i = 0; i < events::kRings; ++i) {
    const std::uint64_t slots = header.slots[i];
    if (slots == 0 || (slots & (slots - 1)) != 0 || slots * flight::kSlotBytes > kMostBytes)
      return fail(ErrorCode::corrupt, "{} is damaged: it has a ring of {} slots", file, slots);
    const BytesView rest = bytes.subspan(std::min(offset, bytes.size()));
    const RingReader ring(rest.first(std::min<std::size_t>(rest.size(), slots * flight::kSlotBytes)), slots,
                          header.heads[i][0]);
    const std::size_t before = recording.events.size();
    ring.read(recording);
    if (ring.overwritten() && recording.events.size() > before) recording.begins[i] = recording.events[before].at;
    offset += slots * flight::kSlotBytes;
  }
  std::ranges::stable_sort(recording.events, {}, &RecordedEvent::at);
  return recording;
}

namespace {

Result<Recording> read_one(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) return fail_errno(path);
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::corrupt, "{} is no file", path);
  Bytes bytes(std::min<std::size_t>(static_cast<std::size_t>(status.st_size), kMostBytes));
  std::size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t more = ::read(file.get(), bytes.data() + got, bytes.size() - got);
    if (more < 0 && errno == EINTR) continue;
    if (more < 0) return fail_errno(path);
    if (more == 0) break;
    got += static_cast<std::size_t>(more);
  }
  bytes.resize(got);
  auto recording = parse_recording(bytes, path);
  if (recording) recording->lives = ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return recording;
}

std::uint64_t memory_of_machine() {
  const long pages = ::sysconf(_SC_PHYS_PAGES), bytes = ::sysconf(_SC_PAGESIZE);
  return pages > 0 && bytes > 0 ? static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(bytes) : SIZE_MAX;
}

// Since 1970, by its own clocks.
std::int64_t last_wall(const Recording& recording) {
  return recording.opened_wall_ns + (last_event(recording) - recording.opened_ns);
}

// Whose clock the others are put on: that of who has decided most.
std::uint64_t reference_of(const std::vector<Recording>& all) {
  std::map<std::uint64_t, std::size_t> decisions;
  for (const auto& one : all)
    decisions[one.clock] +=
        1 + 1000 * static_cast<std::size_t>(std::ranges::count(one.events, events::Kind::epoch, &RecordedEvent::kind));
  std::uint64_t best = 0;
  for (const auto& [clock, count] : decisions)
    if (best == 0 || count > decisions[best]) best = clock;
  return best;
}

// By signs of life, which have the time of the day: it is put right, and goes on while the machine is suspended.
std::vector<std::pair<std::int64_t, std::int64_t>> wall_offsets_of(const std::vector<Recording>& all,
                                                                   std::uint64_t reference) {
  std::vector<std::pair<std::int64_t, std::int64_t>> offsets;
  const auto take = [&](std::int64_t when, std::int64_t wall) { offsets.emplace_back(when, wall - when); };
  for (const auto& one : all) {
    if (one.clock != reference) continue;
    take(one.opened_ns, one.opened_wall_ns);
    for (const auto& event : one.events)
      if (event.kind == events::Kind::beat && event.numbers.a < kNoTime)
        take(event.at, static_cast<std::int64_t>(event.numbers.a));
  }
  std::ranges::stable_sort(offsets, {}, &std::pair<std::int64_t, std::int64_t>::first);
  return offsets;
}

void note_pauses(const std::vector<Recording>& all, const ClockOffsets& offsets, Recordings& into) {
  std::map<std::uint64_t, std::string> hosts;
  for (const auto& one : all) hosts.try_emplace(one.clock, one.host);
  for (const auto& [clock, host] : hosts)
    if (const auto stood = offsets.stood(clock); stood > 0)
      into.notes.push_back(
          fmt::format("The clock of {} has stood for {:.1f} s in all, as while a machine is suspended.", host,
                      static_cast<double>(stood) * 1e-9));
}

void note_damage(Recordings& into) {
  for (const auto& one : into.all) {
    if (one.missing > 0)
      into.notes.push_back(
          fmt::format("{} is cut off: {} events of {} are not in it.", one.file, one.missing, one.who));
    if (one.damaged > 0)
      into.notes.push_back(fmt::format(
          "{} has {} damaged places, which are left out; a process that is writing has some.", one.file, one.damaged));
    const auto unsure = std::ranges::count_if(
        one.events, [](const RecordedEvent& event) { return event.cut && events::names_members(event.kind); });
    if (unsure > 0)
      into.notes.push_back(fmt::format(
          "{} does not have all members of {} epochs, which are left out: their list is cut off.", one.file, unsure));
  }
}

}  // namespace

std::int64_t Recordings::wall(std::int64_t at) const {
  if (wall_offsets.empty()) return at + wall_offset;
  const auto next = std::ranges::lower_bound(wall_offsets, at, {}, &std::pair<std::int64_t, std::int64_t>::first);
  const auto& after = next == wall_offsets.end() ? wall_offsets.back() : *next;
  const auto& before = next == wall_offsets.begin() ? wall_offsets.front() : *(next - 1);
  return at + (at - before.first < after.first - at ? before.second : after.second);
}

Recordings join(std::vector<Recording> all, std::uint64_t job) {
  Recordings joined;
  // A process that had not heard of its job yet may be of any.
  const Recording* last = nullptr;
  for (const auto& one : all)
    if (one.job != 0 && (last == nullptr || last_wall(one) > last_wall(*last))) last = &one;
  joined.job = job != 0 ? job : last != nullptr ? last->job : 0;
  std::set<std::uint64_t> left_out;
  for (const auto& one : all)
    if (one.job != 0 && one.job != joined.job) left_out.insert(one.job);
  for (auto other : left_out)
    joined.notes.push_back(fmt::format("Recordings of another job, {:016x}, are left out; --job takes them.", other));
  std::erase_if(all, [&](const Recording& one) { return one.job != 0 && one.job != joined.job; });

  std::vector<StampedMessage> messages;
  for (const auto& one : all)
    for (const auto& event : one.events)
      if (event.kind == events::Kind::heard && event.numbers.a != one.clock && event.numbers.b < kNoTime)
        messages.push_back({.from = event.numbers.a,
                            .to = one.clock,
                            .sent_ns = static_cast<std::int64_t>(event.numbers.b),
                            .heard_ns = event.at});
  const std::uint64_t reference = reference_of(all);
  const ClockOffsets offsets(messages, reference);
  std::set<std::uint64_t> clocks, unknown;
  joined.wall_offsets = wall_offsets_of(all, reference);
  if (!joined.wall_offsets.empty()) joined.wall_offset = joined.wall_offsets.back().second;
  for (auto& one : all) {
    clocks.insert(one.clock);
    for (auto& event : one.events) {
      const auto time = offsets.on_reference(one.clock, event.at);
      if (time) {
        event.at = std::clamp(time->at, -static_cast<std::int64_t>(kNoTime), static_cast<std::int64_t>(kNoTime));
        joined.clock_error =
            std::max(joined.clock_error, std::min(time->error, static_cast<std::int64_t>(kNoTime / 4)));
      } else {  // the time of the day is all that there is
        unknown.insert(one.clock);
        event.at += one.opened_wall_ns - one.opened_ns - joined.wall_offset;
      }
    }
    for (auto& begins : one.begins)
      if (const auto time = offsets.on_reference(one.clock, begins); time && begins != 0) begins = time->at;
    std::ranges::stable_sort(one.events, {}, &RecordedEvent::at);
  }
  joined.clocks = clocks.size();
  note_pauses(all, offsets, joined);
  for (const auto& one : all)
    if (unknown.erase(one.clock) > 0)
      joined.notes.push_back(fmt::format(
          "No heartbeats compare the clock of {} with the coordinator's: its times are by its own time of day.",
          one.host));
  joined.all = std::move(all);
  note_damage(joined);
  return joined;
}

Result<Recordings> read_recordings(const std::vector<std::string>& paths, std::uint64_t job, std::uint64_t memory) {
  std::vector<std::string> files, others;
  std::vector<std::string> given = paths;
  if (given.empty()) {
    if (auto own = flight::check_default_directory(); !own)
      return fail(own.error().code, "{}: whoever made it could tell anything; name the directory of the recordings",
                  own.error().message);
    given.push_back(flight::default_directory());
  }
  for (const auto& path : given) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (status.type() == std::filesystem::file_type::not_found)
      return fail(ErrorCode::not_found, "{}: there is no such file or directory", path);
    if (status.type() == std::filesystem::file_type::none) return fail(ErrorCode::io, "{}: {}", path, error.message());
    if (!std::filesystem::is_directory(status)) {
      files.push_back(path);
      continue;
    }
    std::filesystem::directory_iterator entry(path, error);
    for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
      files.push_back(entry->path().string());
    if (error) return fail(ErrorCode::io, "directory {}: {}", path, error.message());
  }
  std::ranges::sort(files);
  files.erase(std::unique(files.begin(), files.end()), files.end());
  if (files.size() > kMostFiles) return fail(ErrorCode::exhausted, "{} files are too many", files.size());
  if (memory == 0) memory = memory_of_machine() / 2;
  std::uint64_t taken = 0;
  std::vector<Recording> all;
  std::vector<std::string> unread;
  for (const auto& path : files) {
    if (!path.ends_with(flight::kSuffix)) {
      others.push_back(path);
      continue;
    }
    auto one = read_one(path);
    if (!one) {
      unread.push_back(one.error().message + ".");
      continue;
    }
    taken += sizeof(RecordedEvent) * one->events.size();
    if (taken > memory)
      return fail(
          ErrorCode::exhausted,
          "{} files are more than fits into {} of memory: name the recordings of the replicas that it is about, "
          "of their daemons and of the coordinator",
          files.size(), human_bytes(memory));
    // Of copies the one that has the most.
    const auto copy = std::ranges::find_if(all, [&](const Recording& other) {
      return std::tie(other.clock, other.pid, other.opened_ns, other.who) ==
             std::tie(one->clock, one->pid, one->opened_ns, one->who);
    });
    if (copy == all.end()) all.push_back(std::move(*one));
    else if (one->events.size() > copy->events.size()) *copy = std::move(*one);
  }
  Recordings joined = join(std::move(all), job);
  joined.files = std::move(files);
  joined.others = std::move(others);
  joined.notes.insert(joined.notes.end(), unread.begin(), unread.end());
  return joined;
}

}  // namespace rejoin::daemon
