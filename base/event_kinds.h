// What can happen to a process of a job, as its flight recorder (flight_ring.h) and its event file (events.h) know it.
// The numbers are in recordings: none is ever given another meaning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace rejoin::events {

enum class Kind : std::uint16_t {
  none = 0,
  // any process
  opened = 1,
  named = 2,
  ended = 3,
  beat = 4,
  heard = 5,
  paused = 6,
  note = 7,
  warning = 8,
  // a trainer
  step = 20,
  computed = 21,
  bucket_begun = 22,
  bucket_done = 23,
  reduced = 24,
  committed = 25,
  updated = 26,
  registered = 27,
  put_out = 28,
  failed = 29,
  enter_epoch = 30,
  entered = 31,
  peer_up = 32,
  peer_lost = 33,
  accused = 34,
  waits = 35,
  daemon_lost = 36,
  daemon_back = 37,
  left = 38,
  // a daemon
  rank_up = 50,
  rank_down = 51,
  rank_left = 52,
  catch_up_started = 53,
  catch_up = 54,
  caught_up = 55,
  promoted = 56,
  slices_asked = 57,
  slice_arrived = 58,
  slice_again = 59,
  source_up = 60,
  source_lost = 61,
  coordinator_up = 62,
  coordinator_lost = 63,
  plan = 64,
  slice_verified = 65,
  // a coordinator or a relay
  commit = 80,
  epoch = 81,
  rolled_back = 82,
  stopped = 83,
  recovered = 84,
  finished = 85,
  leader = 86,
  standby = 87,
  node_up = 88,
  node_lost = 89,
  appended = 90,
  heard_down = 91,
  heard_accusation = 92,
  text = 0xffff,  // no event: what one says in words goes on here
};

// An event's numbers. What each means is in its kind's Traits; 0 where it says nothing.
struct Numbers {
  std::uint64_t epoch = 0, step = 0;
  std::uint32_t replica = 0, number = 0;
  std::uint64_t a = 0, b = 0;
};

// Which ring of a recording keeps it: those of every step would push out the few that say why.
enum class Ring : std::uint8_t { steps, signs, incidents };
constexpr std::size_t kRings = 3;

// In which row of its process a trace shows it.
enum class Lane : std::uint8_t { trainer, all_reduce, stream, control, decisions };

struct Traits {
  Kind kind{};
  std::string_view name;
  Ring ring = Ring::incidents;
  Lane lane = Lane::control;
  bool epoch = false, step = false;
  // Names; none: not used. 'a' ending in '?' is true or false. Where there are two texts a line feed is between them.
  std::string_view replica, number, a, b, text, more_text;
  bool in_event_files = false;
};

// Whether it says in words who is a member: "0,1,2c", c of one that catches up, then a line feed, and perhaps more. A
// list without the line feed may have been cut.
constexpr bool names_members(Kind kind) {
  return kind == Kind::epoch || kind == Kind::enter_epoch || kind == Kind::recovered;
}

// Of a kind that this version does not know: of Kind::none, without a name.
const Traits& traits(Kind kind);

}  // namespace rejoin::events
