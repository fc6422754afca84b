#include "daemon/recording.h"

#include <cstring>

#include "base/fail.h"
#include "base/flight_ring.h"
#include "daemon/explain.h"

// Flight recordings of other machines: bytes as a file, and as the events of a file whose checksums fit. Whatever they
// say, they are put on one clock, and every incident in them is explained.
namespace {

using namespace rejoin;

void tell(std::vector<daemon::Recording> all) {
  const auto joined = daemon::join(std::move(all));
  const auto incidents = daemon::find_incidents(joined);
  REJOIN_CHECK(daemon::list(joined, incidents).size() == incidents.all.size());
  for (const auto& one : incidents.all) REJOIN_CHECK(daemon::explain(joined, incidents, one).size() > 2);
}

// Two processes' rings, written to as the bytes say.
void write_and_read(BytesView bytes) {
  constexpr flight::Sizes sizes{{16, 4, 32}};
  std::vector<daemon::Recording> all;
  for (const char* who : {"coordinator", "r1.0"}) {
    alignas(64) static std::byte memory[sizes.bytes()];
    std::memset(memory, 0, sizeof memory);
    flight::Header header{.pid = 7, .opened_ns = 1, .opened_wall_ns = 2};
    header.clock = who[0];
    std::strncpy(header.who, who, sizeof header.who - 1);
    flight::Rings rings(memory, sizes, header);
    struct Written {
      std::uint8_t kind, length;
      std::int64_t at;
      events::Numbers numbers;
    };
    for (Written one; take(bytes, one);) {
      const auto text = bytes.first(std::min<std::size_t>(bytes.size(), one.length));
      bytes = bytes.subspan(text.size());
      rings.put(static_cast<events::Kind>(one.kind), one.at, one.numbers, as_text(text));
      if ((one.numbers.b & 7) == 7) break;
    }
    auto read = daemon::parse_recording(std::span<const std::byte>(memory), who);
    REJOIN_CHECK(read && read->damaged == 0 && read->missing == 0, "what was written is whole");
    all.push_back(std::move(*read));
  }
  tell(std::move(all));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const BytesView bytes(reinterpret_cast<const std::byte*>(data), size);
  if (auto read = daemon::parse_recording(bytes, "file")) tell({std::move(*read)});
  write_and_read(bytes);
  return 0;
}
