#include "bench/catchup_replica.h"

#include <cstdio>
#include <cstring>
#include <numeric>

#include "base/fail.h"
#include "base/mix.h"
#include "bench/host.h"
#include "bench/usage.h"
#include "catchup/gradient_log.h"
#include "transport/factory.h"
#include "transport/idle.h"

namespace rejoin::bench {
namespace {

constexpr std::uint64_t kVersion = 7;
constexpr std::uint64_t kExtent = local::kPartBytes / 3, kWindow = 48;

class Replica {
 public:
  Replica(const CatchUpSettings& settings, Meeting& meeting, std::uint32_t number)
      : s_(settings), meeting_(meeting), number_(number) {}

  Result<std::vector<CatchUpMeasured>> run() {
    if (!s_.hosts.empty()) {
      auto entered = enter_host(s_.hosts[number_]);
      if (!entered) return tl::unexpected(entered.error());
      host_ = *entered;
    }
    auto manifest = local::Manifest::make({{.name = "state", .count = s_.bytes / 12, .columns = 3}});
    if (!manifest) return tl::unexpected(manifest.error());
    auto device = s_.cuda ? device::open_cuda({.ordinal = *s_.cuda}) : device::make_host();
    if (!device) return tl::unexpected(device.error());
    auto access = (*device)->make_access();
    if (!access) return tl::unexpected(access.error());
    access_ = std::move(*access);
    auto stream = (*device)->make_stream();
    if (!stream) return tl::unexpected(stream.error());
    stream_ = std::move(*stream);
    auto owner = local::Owner::make(std::move(*manifest), std::move(*device));
    if (!owner) return tl::unexpected(owner.error());
    owner_ = std::make_unique<local::Owner>(std::move(*owner));
    if (auto cleared = clear(); !cleared) return tl::unexpected(cleared.error());
    if (!joiner()) {
      const auto filled = by_blocks([this](std::uint64_t column, std::uint64_t first, std::span<float> values) {
        for (std::uint64_t i = 0; i < values.size(); ++i) values[i] = value(column, first + i);
        return access_->write(place(column, first, values.size()).data(), std::as_bytes(values));
      });
      if (!filled) return tl::unexpected(filled.error());
    }
    std::vector<CatchUpMeasured> all;
    for (int i = 0; i < s_.repeats; ++i) {
      CatchUpMeasured measured;
      auto bulk = measure_bulk();
      if (!bulk) return tl::unexpected(bulk.error());
      measured.bulk_seconds = *bulk;
      if (auto done = measure_catch_up(measured); !done) return tl::unexpected(done.error());
      all.push_back(measured);
    }
    return all;
  }

 private:
  // A weight, its mean gradient or its mean squared gradient, spread as in a trained model; or a constant.
  float value(std::uint64_t column, std::uint64_t i) const {
    if (!s_.real_data) return 0.125f;
    const std::uint64_t x = mixed((i * 3 + column + 1) * 0x9e3779b97f4a7c15);
    float sum = -6;  // of twelve uniform numbers: nearly normal
    for (int k = 0; k < 12; ++k) sum += static_cast<float>(((x >> (5 * k)) ^ (x << (k + 7))) & 0xffff) / 65536.0f;
    const float normal = sum;
    return column == 0 ? 0.02f * normal : column == 1 ? 1e-4f * normal : 1e-8f * normal * normal;
  }
  // The elements of a column of the state.
  std::span<std::byte> place(std::uint64_t column, std::uint64_t first, std::uint64_t count) const {
    return owner_->column(0, static_cast<std::uint32_t>(column)).subspan(first * 4, count * 4);
  }
  // Calls `what` for all of the state, with room for a block of it at the host.
  template <typename What>
  Result<> by_blocks(What what) {
    constexpr std::uint64_t block = 1 << 18;
    std::vector<float> values(block);
    for (std::uint64_t column = 0; column < 3; ++column)
      for (std::uint64_t first = 0; first < s_.bytes / 12; first += block)
        if (auto done = what(column, first, std::span(values).first(std::min(block, s_.bytes / 12 - first))); !done)
          return done;
    return {};
  }
  Result<> clear() {
    return stream_->clear(state().data(), state().size()).and_then([&] { return stream_->synchronize(); });
  }
  std::span<std::byte> state() const { return owner_->memory_ranges().front(); }  // all of it
  bool joiner() const { return number_ == 0; }
  std::uint32_t processes() const { return s_.sources + 1; }
  Result<> meet_all() { return meet(meeting_, processes()) ? Result<>{} : another_failed(); }
  Result<> open() {
    auto engine = transport::make_engine(s_.transport, owner_->device());
    if (!engine) return tl::unexpected(engine.error());
    engine_ = std::move(*engine);
    auto address = engine_->listen({host_ + ":0"});
    if (!address) return tl::unexpected(address.error());
    std::snprintf(meeting_.addresses[number_], sizeof meeting_.addresses[number_], "%s", address->text.c_str());
    idle_.emplace(*engine_, transport::Idle::Options{.spins = 10, .yields = 2});
    return meet_all();
  }

  // Each source writes its half of the state in writes of the stream's size, a bounded number in flight.
  Result<double> measure_bulk() {
    if (auto opened = open(); !opened) return tl::unexpected(opened.error());
    auto region = engine_->register_region(state(), owner_->device()->kind(),
                                           joiner() ? transport::Access::remote_write : transport::Access::local);
    if (!region) return tl::unexpected(region.error());
    const std::uint64_t share = state().size() / s_.sources;
    if (!joiner()) {
      auto endpoint = engine_->connect({meeting_.addresses[0]}, bytes_of(number_));
      if (!endpoint) return tl::unexpected(endpoint.error());
      transport::RemoteRegion target;
      std::uint64_t posted = 0, done = 0;
      const std::uint64_t begin = (number_ - 1) * share;
      const auto post = [&] {
        if (posted >= share) return;
        const std::uint64_t length = std::min(kExtent, share - posted);
        const transport::Write write{.context = length,
                                     .local = {*region, begin + posted},
                                     .remote = {target, begin + posted},
                                     .length = length,
                                     .notify = std::nullopt};
        if (engine_->write(*endpoint, {&write, 1})) posted += length;
      };
      while (done < share)
        for (const auto& event : poll()) {
          if (event.kind == transport::EventKind::closed) return fail(ErrorCode::unavailable, "the joiner is gone");
          if (event.kind == transport::EventKind::message) {
            std::memcpy(&target, event.message.data(), sizeof target);
            for (std::uint64_t i = 0; i < kWindow; ++i) post();
          }
          if (event.kind == transport::EventKind::completed) done += event.value, post();
        }
      (void)engine_->send(*endpoint, as_bytes("done"));
      while (engine_->poll().empty() && std::exchange(flushes_, flushes_ + 1) < 1000) {
      }
      flushes_ = 0;
    }
    double seconds_taken = 0;
    if (joiner()) {
      std::vector<transport::EndpointId> sources;
      std::uint32_t finished = 0;
      TimePoint start{};
      while (finished < s_.sources) {
        if (meeting_.failed.load() != 0) return another_failed();
        for (const auto& event : poll()) {
          if (event.kind == transport::EventKind::accepted) sources.push_back(event.endpoint);
          if (event.kind == transport::EventKind::accepted && sources.size() == s_.sources) {
            start = clock_.now();
            const auto remote = engine_->remote(*region);
            for (auto endpoint : sources) (void)engine_->send(endpoint, bytes_of(remote));
          }
          finished += event.kind == transport::EventKind::message;
        }
      }
      seconds_taken = seconds(clock_.now() - start);
    }
    if (auto met = meet_all(); !met) return tl::unexpected(met.error());
    engine_->deregister(*region);
    engine_.reset();
    return seconds_taken;
  }

  Result<> measure_catch_up(CatchUpMeasured& measured) {
    if (joiner()) {  // as a trainer that has just started: it has nothing
      if (auto cleared = clear(); !cleared) return cleared;
      for (std::size_t i = 0; i < owner_->manifest().slices().size(); ++i)
        owner_->page().slice_statuses()[i].store(local::SliceStatus{}.packed());
    }
    owner_->set_version(kVersion);
    if (auto opened = open(); !opened) return opened;
    catchup::Service service(*engine_, transport::Secret{}, {s_.compression, s_.limit}, clock_);
    auto view = local::View::of(*owner_);
    if (!view) return tl::unexpected(view.error());
    const catchup::RankKey key{ReplicaId(number_), RankId(0)};
    if (auto added = service.add_rank(key, 1, std::move(*view)); !added) return added;
    if (!joiner()) service.serve(key, Incarnation(number_));
    // As a daemon does when a trainer registers: its memory is mapped.
    do service.poll(clock_.now());
    while (service.busy());
    if (auto met = meet_all(); !met) return met;
    const Usage usage;
    Used used;
    if (joiner()) {
      std::set<catchup::SourceAddress> sources;
      for (std::uint32_t i = 1; i <= s_.sources; ++i)
        sources.insert({ReplicaId(i), Incarnation(i), {meeting_.addresses[i]}});
      const TimePoint start = clock_.now();
      service.catch_up(key, sources, Step(kVersion), start);
      auto gradient_log = catchup::GradientLog::make(*owner_, GiB);
      if (!gradient_log) return tl::unexpected(gradient_log.error());
      TimePoint updated = start;
      for (bool caught_up = false; !caught_up;) {
        const TimePoint now = clock_.now();
        if (meeting_.failed.load() != 0) return another_failed();
        caught_up = !service.poll(now).empty();
        const auto progress = service.progress(key, now);
        if (measured.arrived_seconds == 0 && progress->slices == progress->total_slices)
          measured.arrived_seconds = seconds(now - start);
        // The trainer's part, every few milliseconds: what has arrived becomes current.
        if (now - updated >= std::chrono::milliseconds(5) || measured.arrived_seconds != 0) {
          updated = now;
          const auto none = [](std::uint32_t, std::uint64_t, std::uint64_t) { return BytesView{}; };
          if (auto begun = (*gradient_log)->begin(Step(kVersion), false, 1, none); !begun)
            return tl::unexpected(begun.error());
          (*gradient_log)->end(Step(kVersion), false);
        }
        if (!service.busy()) idle_->wait(true, std::chrono::milliseconds(1));
        else idle_->reset();
      }
      measured.verified_seconds = seconds(clock_.now() - start);
      used = usage.now();
      if (const auto again = service.progress(key, clock_.now())->refetched; again > 0)
        return fail(ErrorCode::corrupt, "{} slices had to be fetched again", again);
      const auto checked =
          by_blocks([this](std::uint64_t column, std::uint64_t first, std::span<float> values) -> Result<> {
            const BytesView there = place(column, first, values.size());
            if (auto read = access_->read(there, std::as_writable_bytes(values).data()); !read) return read;
            for (std::uint64_t i = 0; i < values.size(); i += 1021)
              if (values[i] != value(column, first + i))
                return fail(ErrorCode::corrupt, "element {} of column {} did not arrive", first + i, column);
            return {};
          });
      if (!checked) return checked;
      meeting_.wrong.store(1);  // tells the sources that it is over
    } else {
      while (meeting_.wrong.load() == 0 && meeting_.failed.load() == 0) {
        service.poll(clock_.now());
        if (!service.busy()) idle_->wait(true, std::chrono::milliseconds(1));
        else idle_->reset();
      }
      used = usage.now();
    }
    if (auto met = meet_all(); !met) return met;
    if (joiner()) meeting_.wrong.store(0);
    return tell_usage(measured, used, usage.why_not(), static_cast<double>(service.bytes_served()));
  }

  Result<> tell_usage(CatchUpMeasured& measured, const Used& used, const std::string& why_not, double sent) {
    const auto cpu = gather(meeting_, number_, processes(), used.cpu_seconds);
    const auto calls = gather(meeting_, number_, processes(), static_cast<double>(used.system_calls));
    const auto bytes = gather(meeting_, number_, processes(), sent);
    if (cpu.empty() || calls.empty() || bytes.empty()) return another_failed();
    measured.joiner_cpu = cpu[0], measured.joiner_calls = calls[0];
    measured.sources_cpu = std::accumulate(cpu.begin() + 1, cpu.end(), 0.0);
    measured.sources_calls = std::accumulate(calls.begin() + 1, calls.end(), 0.0);
    const double all = std::accumulate(bytes.begin() + 1, bytes.end(), 0.0);
    for (std::size_t i = 1; i < bytes.size(); ++i) measured.shares.push_back(all > 0 ? bytes[i] / all : 0);
    measured.calls_not_counted = why_not;
    return {};
  }

  std::span<const transport::Event> poll() {
    auto events = engine_->poll();
    if (events.empty()) idle_->wait(true, std::chrono::milliseconds(10));
    else idle_->reset();
    return events;
  }

  const CatchUpSettings& s_;
  Meeting& meeting_;
  const std::uint32_t number_;
  std::string host_ = "127.0.0.1";  // its address
  SteadyClock clock_;
  std::unique_ptr<device::Access> access_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<local::Owner> owner_;
  std::unique_ptr<transport::Engine> engine_;
  std::optional<transport::Idle> idle_;
  int flushes_ = 0;
};

}  // namespace

Result<std::vector<CatchUpMeasured>> run_replica(const CatchUpSettings& settings, Meeting& meeting,
                                                 std::uint32_t number) {
  return Replica(settings, meeting, number).run();
}

}  // namespace rejoin::bench
