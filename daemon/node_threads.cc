// The daemon's other threads may stand still, in a driver of a NIC or a GPU, or at memory that the system does not
// give. Then others wait for them without knowing it: that is told here.
#include <cstdlib>
#include <future>

#include "base/events.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/node_server.h"

namespace rejoin::daemon {

namespace {

constexpr const char* kRemedy =
    "it is in a driver of the GPU or the NIC, or at memory that the system does not give; where that lasts, end this "
    "daemon, which is started again";

std::string stands(const char* what, Duration still) {
  return fmt::format("this daemon's thread {} has stood still for {:.0f} s: {}", what, seconds(still), kRemedy);
}

}  // namespace

std::string NodeServer::why_stream_stands(const DeviceStream& stream) {
  if (stream.stands == Duration{}) return {};
  return stands(stream.remote ? "that catches up from and to a GPU" : "that catches up", stream.stands);
}

std::string NodeServer::why_opener_stands() const {
  return opener_stands_ == Duration{} ? std::string() : stands("that opens what trainers offer", opener_stands_);
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

void NodeServer::ask_opener() {
  if (opener_turns_ != opener_asked_) return;
  ++opener_asked_;
  asio::post(*opener_, [this] { ++opener_turns_; });
}

void NodeServer::mind_threads() {
  const auto look = [this](DeviceStream& stream) {
    stream.stands = stream.still.look(stream.thread->turns(), now(), options_.silence);
    if (stream.stands > Duration{} && stream.still.may_tell(now())) spdlog::warn("{}", why_stream_stands(stream));
  };
  look(*host_);
  for (auto& [id, trainer] : trainers_)
    if (trainer.own) look(*trainer.own);
  ask_opener();
  opener_stands_ = opener_still_.look(opener_turns_, now(), options_.silence);
  if (opener_stands_ == Duration{}) return;
  if (opener_still_.may_tell(now())) spdlog::warn("{}", why_opener_stands());
  for (auto& [id, trainer] : trainers_) {
    if (!trainer.opening || trainer.key || std::exchange(trainer.told_to_wait, true)) continue;
    proto::ToTrainer message;
    message.set_waits(why_opener_stands());
    send(trainer, message);
  }
}

// Nothing ends a thread that stands in a driver but the process's end.
void NodeServer::end_threads() {
  constexpr auto longest = std::chrono::seconds(20);  // what they are at in order may take seconds
  const TimePoint deadline = now() + longest;
  std::vector<const DeviceStream*> streams;
  if (host_)
    for (const auto* stream : streams_here()) {
      if (stream->remote) stream->remote->disconnect();
      stream->thread->stop();
      streams.push_back(stream);
    }
  const auto left = [&] { return std::max<Duration>(deadline - now(), Duration{}); };
  const char* late = nullptr;
  for (const auto* stream : streams)
    if (!stream->thread->ends_within(left())) late = "that of a catch-up";
  if (opener_) {
    std::promise<void> ends;
    const auto ended = ends.get_future();
    asio::post(*opener_, [ends = std::move(ends)]() mutable { ends.set_value(); });
    if (ended.wait_for(left()) != std::future_status::ready) late = "that which opens and closes what trainers offer";
  }
  if (late == nullptr) return;
  spdlog::error("a thread of this daemon stands still, {}: this process ends without it", late);
  events::record(events::Kind::ended, {}, "without a thread that stands still");
  spdlog::default_logger()->flush();
  std::_Exit(1);
}

}  // namespace rejoin::daemon
