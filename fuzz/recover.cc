#include "membership/coordinator.h"
#include "membership/log.h"

// Records as a sound log could hold them, whatever they say: a length byte and an unused one before each.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace rejoin;
  using namespace rejoin::membership;
  std::vector<proto::LogRecord> records;
  while (size >= 2) {
    const std::size_t length = std::min<std::size_t>(data[0], size - 2);
    proto::LogRecord record;
    if (record.ParseFromArray(data + 2, static_cast<int>(length))) records.push_back(std::move(record));
    data += 2 + length;
    size -= 2 + length;
  }
  (void)audit(trained_by_step(records));
  Coordinator coordinator({.replicas = 2, .ranks = 2, .batch = 3});
  const TimePoint now{std::chrono::seconds(10)};
  if (!coordinator.recover(records, now)) return 0;
  for (int i = 1; i < 40; ++i) (void)coordinator.on_tick(now + i * std::chrono::milliseconds(200));
  (void)coordinator.waiting_for(now);
  return 0;
}
