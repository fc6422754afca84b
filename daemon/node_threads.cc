// The daemon's other threads may stand still, in a driver of a NIC or a GPU, or at memory that the system does not
// give. Then others wait for them without knowing it: that is told here.
#include <cstdlib>

#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/node_server.h"

namespace rejoin::daemon {

std::string why_it_stands(const std::string& thread, Duration still) {
  return fmt::format(
      "this daemon's thread {} has stood still for {:.0f} s: it is in a driver of the GPU or the NIC, or at memory "
      "that the system does not give; where that lasts, end this daemon, which is started again",
      thread, seconds(still));
}

std::string why_it_stands_for_a_gpu(pid_t trainer, Duration still) {
  return fmt::format(
      "this daemon's thread that catches up from and to a GPU has stood still for {:.0f} s: it, or more likely the "
      "thread rejoin-memory of {} that serves that GPU's memory to it, is in a driver of the GPU or the NIC, or at "
      "memory that the system does not give; where that lasts, end that trainer, which is started again",
      seconds(still), trainer == 0 ? "the trainer" : fmt::format("trainer {}", trainer));
}

std::string NodeServer::why_stream_stands(const DeviceStream& stream) {
  if (stream.stands == Duration{}) return {};
  return stream.remote ? why_it_stands_for_a_gpu(stream.trainer, stream.stands)
                       : why_it_stands("that catches up", stream.stands);
}

std::string NodeServer::why_opener_stands() const {
  return opener_stands_ == Duration{} ? std::string() : why_it_stands("that opens what trainers offer", opener_stands_);
}

std::vector<std::string> NodeServer::standing() const {
  std::vector<std::string> all;
  for (const auto* stream : streams_here())
    if (auto why = why_stream_stands(*stream); !why.empty()) all.push_back(std::move(why));
  if (auto why = why_opener_stands(); !why.empty()) all.push_back(std::move(why));
  return all;
}

std::vector<const NodeServer::DeviceStream*> NodeServer::streams_here() const {
  std::vector<const DeviceStream*> streams{host_.get()};
  for (const auto& [id, trainer] : trainers_)
    if (trainer.own) streams.push_back(trainer.own.get());
  return streams;
}

void NodeServer::mind_threads() {
  const auto look = [this](DeviceStream& stream) {
    stream.stands = stream.still.look(stream.thread->turns(), now(), options_.silence);
    if (stream.stands > Duration{} && stream.still.may_tell(now())) spdlog::warn("{}", why_stream_stands(stream));
  };
  look(*host_);
  for (auto& [id, trainer] : trainers_)
    if (trainer.own) look(*trainer.own);
  opener_->ask();
  opener_stands_ = opener_still_.look(opener_->turns(), now(), options_.silence);
  if (opener_stands_ == Duration{}) return;
  if (opener_still_.may_tell(now())) spdlog::warn("{}", why_opener_stands());
  for (auto& [id, trainer] : trainers_) {
    if (!trainer.opening || trainer.key || std::exchange(trainer.told_to_wait, true)) continue;
    proto::ToTrainer message;
    message.set_waits(why_opener_stands());
    send(trainer, message);
  }
}

// Nothing ends a thread that stands in a driver but the process's end. Until that the coordinator hears nothing of this
// node's trainers, and they find no other daemon: so what is known to stand isn't waited for, and the others for a part
// of the silence. Where there are no trainers that costs nobody anything.
void NodeServer::end_threads() {
  constexpr Duration shortest = std::chrono::milliseconds(500), longest = std::chrono::seconds(20);
  const TimePoint deadline = now() + (trainers_.empty() ? longest : std::max<Duration>(options_.silence / 4, shortest));
  std::string late;
  const auto left = [&](Duration stands) {
    return stands > Duration{} || !late.empty() ? Duration{} : std::max<Duration>(deadline - now(), Duration{});
  };
  const auto stop = [](const DeviceStream& stream) {
    if (stream.remote) stream.remote->disconnect();
    stream.thread->stop();
  };
  const auto wait = [&](const DeviceStream& stream) {
    if (!stream.thread->ends_within(left(stream.stands))) late = "that of a catch-up";
  };
  const auto streams = host_ ? streams_here() : std::vector<const DeviceStream*>();
  for (const auto* stream : streams) stop(*stream);
  for (const auto* stream : streams) wait(*stream);
  if (late.empty() && opener_ && !opener_->ends_within(left(opener_stands_)))
    late = "that which opens and closes what trainers offer";
  if (late.empty())  // else the opener may still be at it
    for (const auto& [id, opened] : opening_)
      if (opened && opened->stream) stop(*opened->stream), wait(*opened->stream);
  if (late.empty()) return;
  spdlog::error("a thread of this daemon has not come to its end, {}: this process ends without it", late);
  events::record(events::Kind::ended, {}, "without a thread that has not come to its end");
  spdlog::default_logger()->flush();
  std::_Exit(1);
}

}  // namespace rejoin::daemon
