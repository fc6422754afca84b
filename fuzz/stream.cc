#include "base/log.h"
#include "catchup/service.h"
#include "local/owner.h"
#include "stream.pb.h"
#include "transport/sim/fabric.h"

namespace {

using namespace rejoin;

const transport::Secret kSecret = transport::Secret::of({77, 0});

local::Owner make_owner() {
  auto owner = local::Owner::make(local::Manifest::make({{.name = "a", .count = 5000, .columns = 2},
                                                         {.name = "b", .count = 700, .elementwise = false}})
                                      .value());
  return std::move(owner.value());
}

}  // namespace

// A peer that has proved itself and then says and writes anything over the catch-up stream: to a source as a joiner,
// and to a joiner as a source. Operations, each with a length byte behind it and its bytes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using transport::EventKind;
  spdlog::set_level(spdlog::level::off);
  static local::Owner served = make_owner(), joining = make_owner();
  VirtualClock clock;
  clock.set(TimePoint(std::chrono::seconds(1)));
  transport::sim::Fabric fabric({.max_delay = std::chrono::microseconds(2)}, clock);
  auto engine = fabric.make_engine(), attacker = fabric.make_engine();
  const auto address = engine->listen({}).value(), hostile = attacker->listen({}).value();
  Bytes memory(64 << 10);
  const auto region =
      attacker->register_region(memory, transport::MemoryKind::host, transport::Access::remote_write).value();
  {
    catchup::Service service(*engine, kSecret, {.compression = catchup::Compression::always}, clock);
    const catchup::RankKey source{ReplicaId(0), RankId(0)}, joiner{ReplicaId(1), RankId(0)};
    if (!service.add_rank(source, 1, local::View::of(served).value()) ||
        !service.add_rank(joiner, 2, local::View::of(joining).value()))
      return 0;
    service.serve(source, Incarnation(1));
    std::vector<transport::EndpointId> endpoints;
    std::uint64_t asked_key = 0, asked_length = 0;  // of its memory, from a joiner's last message
    const auto turn = [&] {
      for (int i = 0; i < 20 && fabric.next_event() != TimePoint::max(); ++i) fabric.step();
      (void)service.poll(clock.now());
      for (const auto& event : attacker->poll()) {
        if (event.kind == EventKind::accepted || event.kind == EventKind::connected)
          endpoints.push_back(event.endpoint);
        if (event.kind != EventKind::message) continue;
        proto::Stream asked;
        if (!asked.ParseFromArray(event.message.data(), static_cast<int>(event.message.size())) || !asked.has_fetch())
          continue;
        if (asked.fetch().regions_size() == 0) continue;
        asked_key = asked.fetch().regions(0).key();
        asked_length = asked.fetch().regions(0).length();
      }
    };
    while (size >= 2) {
      const std::uint8_t what = data[0];
      const std::size_t length = std::min<std::size_t>(data[1], size - 2);
      const BytesView bytes(reinterpret_cast<const std::byte*>(data + 2), length);
      data += 2 + length;
      size -= 2 + length;
      switch (what % 8) {
        case 0:
        case 1:
        case 2:
          if (!endpoints.empty()) (void)attacker->send(endpoints[what / 8 % endpoints.size()], bytes);
          break;
        case 3: (void)attacker->connect(address, bytes); break;
        case 4: {
          const catchup::Hello hello{0, 0, 0, 1, served.manifest().hash()};
          (void)attacker->connect(address, bytes_of(hello));
          break;
        }
        case 5:
          service.catch_up(joiner, {{ReplicaId(2), Incarnation(what / 8u), hostile}}, Step(what % 3), clock.now(),
                           {.fellows = {{ReplicaId(3), Incarnation(1), hostile}}, .own = what / 8u % 2, .of = 2});
          if (what >= 128) service.serve(joiner, Incarnation(1), 0, true);
          break;
        case 6: {
          if (endpoints.empty() || length < 4) break;
          std::copy(bytes.begin(), bytes.end(), memory.begin());
          const std::uint64_t offset = (data[-1] * 256u + data[-2]) * 8u;
          const transport::Write write{
              .context = 1,
              .local = {region, 0},
              .remote = {{asked_key, asked_length}, offset},
              .length = length,
              .notify = static_cast<std::uint64_t>(bytes[0]) | static_cast<std::uint64_t>(bytes[1]) << 40};
          (void)attacker->write(endpoints[what / 8 % endpoints.size()], {&write, 1});
          break;
        }
        default:
          clock.set(clock.now() + std::chrono::milliseconds(what));
          if (what / 8 % 8 == 0) service.finish(joiner);
      }
      turn();
    }
    for (int i = 0; i < 5; ++i) turn();
  }
  return 0;
}
