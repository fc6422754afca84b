#include "daemon/node_server.h"

#include <unistd.h>

#include "base/deadlines.h"
#include "base/entropy.h"
#include "base/events.h"
#include "base/fail.h"
#include "base/flight.h"
#include "base/log.h"
#include "base/start_thread.h"
#include "daemon/listen.h"
#include "daemon/log_notes.h"
#include "transport/factory.h"

namespace rejoin::daemon {

using Gone = membership::Node::Gone;

NodeServer::NodeServer(asio::io_context& io, const NodeOptions& options, const JobKeys& keys)
    : io_(io),
      options_(options),
      keys_(keys),
      listener_(io),
      accept_again_(io),
      timer_(io),
      family_(transport::family_of(options.transport)),
      machine_(options.name, options.silence, random_number(), options.location),
      streams_(family_, Location::parse(options.location).value_or(Location())),
      reports_as_(random_number()),
      coordinators_(io, options.coordinator, options.name, keys, options.silence,
                    [this](proto::LeaderView& view) { machine_.write_hosts(view); },
                    {.up =
                         [this] {
                           find_own_hosts(true);
                           place_trainers();
                           carry_out(machine_.on_coordinator_up(now()));
                         },
                     .message =
                         [this](const proto::ToNode& message) {
                           if (message.has_inquiry()) look_after(message.inquiry());
                           record_plan(message);
                           note_answer(message);
                           if (message.has_registered()) coordinator_page_ = message.registered().page();
                           carry_out(machine_.on_coordinator_message(message, now()));
                           if (message.has_plan() || message.has_peers()) follow_plan(message.has_peers());
                         },
                     .down = [this] { carry_out(machine_.on_coordinator_down()); },
                     .over = [this] { return machine_.plan().finished(); },
                     .rejected = [this] { ++rejected_; }}) {}

Result<std::unique_ptr<NodeServer>> NodeServer::start(asio::io_context& io, const NodeOptions& options,
                                                      const JobKeys& keys) {
  auto listener = listen_unix(options.socket);
  if (!listener) return tl::unexpected(listener.error());
  std::unique_ptr<NodeServer> server(new NodeServer(io, options, keys));
  try {
    server->opener_.emplace();
  } catch (const std::system_error& error) {
    return gives_no_thread(error);
  }
  server->listener_fd_ = std::move(*listener);
  server->socket_file_.emplace(options.socket);
  auto watched = duplicate(server->listener_fd_.get());
  if (!watched) return tl::unexpected(watched.error());
  server->listener_.assign(watched->release());
  auto compression = catchup::parse_compression(options.compression);
  if (!compression) return tl::unexpected(compression.error());
  server->compression_ = *compression;
  auto host = server->open_stream({}, device::make_host(), options.data_listen);
  if (!host) return tl::unexpected(host.error());
  server->host_ = std::move(*host);
  const auto address = server->advertised(server->host_->thread->address());
  if (!address) return tl::unexpected(address.error());
  server->say_where_it_is();
  server->accept();
  server->coordinators_.connect();
  server->tick();
  return server;
}

NodeServer::~NodeServer() {
  end_threads();
  if (opener_) opener_->join();
  opening_.clear();
  host_.reset();
  trainers_.clear();
}

Result<std::unique_ptr<NodeServer::DeviceStream>> NodeServer::open_stream(std::optional<membership::RankConnection> of,
                                                                          std::shared_ptr<device::Device> device,
                                                                          const std::string& listen) {
  auto stream = std::make_unique<DeviceStream>();
  auto thread = StreamThread::start(
      options_.transport, device, options_.numa != "off", listen, keys_.data_secrets(),
      {compression_, options_.stream_limit * 1e6, options_.silence}, [this, of](StreamThread::Report report) {
        asio::post(io_, [this, of, report = std::move(report)]() mutable { on_report(of, std::move(report)); });
      });
  if (!thread) return tl::unexpected(thread.error());
  stream->device = std::move(device);
  stream->thread = std::move(*thread);
  return stream;
}

// The last two descriptors are the line to the trainer that serves its GPU's memory.
Result<std::unique_ptr<NodeServer::DeviceStream>> NodeServer::open_remote(membership::RankConnection of,
                                                                          Offering& offering) {
  auto& fds = offering.fds;
  device::Line line{.socket = std::move(fds[fds.size() - 2]), .memory = std::move(fds.back())};
  fds.resize(fds.size() - 2);
  auto remote = device::connect_remote(std::move(line), offering.hello.device());
  if (!remote) return tl::unexpected(remote.error());
  // The host's stream has the port that was asked for; the others listen beside it.
  std::vector<std::string> beside = split(options_.data_listen, '|');  // by rail
  for (auto& one : beside) one = one.substr(0, one.rfind(':')) + ":0";
  auto opened = open_stream(of, *remote, fmt::format("{}", fmt::join(beside, "|")));
  if (opened) (*opened)->remote = std::move(*remote);
  return opened;
}

// What a state of tens of thousands of tensors is read from takes a tenth of a second.
Result<NodeServer::Opened> NodeServer::open(membership::RankConnection of, Offering& offering) {
  Opened opened;
  if (offering.hello.device() != "host") {
    auto stream = open_remote(of, offering);
    if (!stream) return tl::unexpected(stream.error());
    opened.stream = std::move(*stream);
  }
  auto view = local::View::make(std::move(offering.fds), opened.stream ? opened.stream->device : host_->device);
  if (!view) return tl::unexpected(view.error());
  opened.view.emplace(std::move(*view));
  return opened;
}

void NodeServer::on_opened(membership::RankConnection from, const proto::LocalHello& hello) {
  Result<Opened> opened = std::move(opening_.extract(from).mapped());
  auto found = trainers_.find(from);
  if (found == trainers_.end()) {
    if (opened) opener_->post([opened = std::move(opened)]() mutable { opened = Opened(); });
    return;
  }
  if (!opened) return refuse(from, opened.error());
  Trainer& trainer = found->second;
  trainer.own = std::move(opened->stream);
  if (trainer.own) trainer.own->trainer = trainer.credentials.pid;
  DeviceStream& stream = trainer.own ? *trainer.own : *host_;
  if (auto admitted = admit(trainer, hello, std::move(*opened->view), stream); !admitted)
    refuse(from, admitted.error());
}

NodeServer::DeviceStream* NodeServer::stream_of(std::optional<membership::RankConnection> of) {
  if (!of) return host_.get();
  auto found = trainers_.find(*of);
  return found == trainers_.end() ? nullptr : found->second.own.get();
}

// ---- the coordinator

// A socket's file may go while the daemon runs, by whoever cleans /tmp: then no trainer that starts again would find
// it.
void NodeServer::keep_listening() {
  if (!listener_fd_ || socket_file_->in_place()) return;
  auto listener = listen_unix(options_.socket);
  auto duplicated = listener ? duplicate(listener->get()) : tl::unexpected(listener.error());
  auto watched = duplicated ? daemon::watch(io_, std::move(*duplicated)) : tl::unexpected(duplicated.error());
  if (!watched) {
    if (!std::exchange(unreachable_, true))
      spdlog::error("the socket {} is gone, and can't be made again, so no trainer can come: {}", options_.socket,
                    watched.error().message);
    return;
  }
  unreachable_ = false;
  spdlog::warn("the socket {} was removed; it is there again", options_.socket);
  ++listens_;
  listener_.close();
  accept_again_.cancel();
  socket_file_.emplace(options_.socket);
  listener_fd_ = std::move(*listener);
  listener_ = std::move(**watched);
  accept();
}

void NodeServer::tick() {
  timer_.expires_after(deadlines::tick_of(options_.silence));
  timer_.async_wait([this](asio::error_code error) {
    if (error) return;
    keep_listening();
    coordinators_.tick(now());
    look_for_ends();
    carry_out(machine_.on_tick(now()));
    drop_who_reads_nothing();
    answer_leavers();
    mind_threads();
    give_sign_of_life();
    if (machine_.coordinator_up()) coordinators_.check(machine_.coordinator_heard());
    look_for_own_hosts();
    tell();
    tick();
  });
}

void NodeServer::carry_out(const membership::Node::Actions& actions) {
  log_notes(actions.notes);
  for (const auto& message : actions.to_coordinator) coordinators_.send(message);
  for (const auto& [id, control] : actions.to_ranks) {
    auto found = trainers_.find(id);
    if (found == trainers_.end()) continue;
    proto::ToTrainer message;
    *message.mutable_control() = control;
    send(found->second, message);
  }
  for (auto id : actions.silent)
    drop(id, fmt::format("its process gave no sign of life for {} ms", options_.silence.count()), Gone::silent);
}

// Starts, updates and ends the streams into local joiners as the plan says.
void NodeServer::follow_plan(bool other_peers) {
  const Step committed(machine_.plan().committed());
  forget_gone();
  for (const auto& stream : streams_.of(machine_, other_peers)) {
    const auto& [connection, key, catching_up, job, serves, sources, chain, strange] = *stream;
    for (const auto& one : strange) warn_of(one);
    auto found = trainers_.find(connection);
    if (found == trainers_.end()) continue;
    Trainer& trainer = found->second;
    if (catching_up && !trainer.catching_up)
      events::record(events::Kind::catch_up_started,
                     {.step = machine_.plan().step(), .replica = key.replica.value, .number = key.rank.value});
    if (trainer.catching_up && !catching_up) {
      trainer.stream->post([key = key](catchup::Service& service, TimePoint) { service.finish(key); });
      if (serves)
        events::record(events::Kind::promoted,
                       {.step = machine_.plan().step(), .replica = key.replica.value, .number = key.rank.value});
    }
    const bool other_part = std::exchange(trainer.catching_up, catching_up) != catching_up;
    if (std::exchange(trainer.serves, serves) != serves || other_part)
      trainer.stream->post([key = key, serves = serves, job = job, joining = catching_up](
                               catchup::Service& service, TimePoint) { service.serve(key, serves, job, joining); });
    if (catching_up)
      trainer.stream->post_latest(key, [stream, committed](catchup::Service& service, TimePoint at) {
        service.catch_up(stream->key, stream->sources, committed, at, stream->chain);
      });
  }
}

// Once for each epoch that it hears of.
void NodeServer::record_plan(const proto::ToNode& message) const {
  if (!message.has_plan() || message.plan().epoch() == machine_.plan().epoch()) return;
  flight::set_job(message.plan().job());
  events::record(events::Kind::plan, {.epoch = message.plan().epoch(), .step = message.plan().step()});
}

void NodeServer::record_progress(const catchup::RankKey& key, const catchup::CatchUpProgress& progress) {
  events::Numbers numbers{.replica = key.replica.value, .number = key.rank.value, .a = progress.bytes};
  if (!progress.done) {
    numbers.b = progress.total_bytes;
    return events::record(events::Kind::catch_up, numbers);
  }
  numbers.b = static_cast<std::uint64_t>(progress.seconds * 1e9);
  events::record(events::Kind::caught_up, numbers,
                 fmt::format("{} slices from {} {}, {} fetched again", progress.total_slices, progress.sources_used,
                             progress.sources_used == 1 ? "source" : "sources", progress.refetched));
}

void NodeServer::on_report(std::optional<membership::RankConnection> of, StreamThread::Report report) {
  DeviceStream* stream = stream_of(of);
  if (stream == nullptr) return;
  stream->bytes_served = report.bytes_served;
  stream->bytes_passed_on = report.bytes_passed_on;
  stream->serving = std::move(report.serving);
  for (const auto& [key, progress] : report.progress) {
    auto& known = progress_[key];
    if (!known.done) record_progress(key, progress);  // the end once
    refetched_ += progress.refetched - (progress.refetched >= known.refetched ? known.refetched : 0);
    known = progress;
    events::emit("catch_up", {{"replica", std::uint64_t{key.replica.value}},
                              {"rank", std::uint64_t{key.rank.value}},
                              {"bytes", progress.bytes},
                              {"wire_bytes", progress.wire_bytes},
                              {"total", progress.total_bytes},
                              {"rate", progress.bytes_per_second},
                              {"sources", std::uint64_t{progress.sources_used}},
                              {"from_joiners", progress.from_joiners},
                              {"passed_on", progress.passed_on},
                              {"verified", std::uint64_t{progress.verified}},
                              {"slices", std::uint64_t{progress.total_slices}},
                              {"refetched", std::uint64_t{progress.refetched}},
                              {"seconds", progress.seconds},
                              {"done", progress.done}});
  }
  const auto hears = [&](catchup::RankKey key, const proto::FromNode& message) {
    const auto hearer = find_trainer(key);
    if (hearer == trainers_.end()) return false;
    carry_out(machine_.on_rank_message(hearer->first, message, now()));
    return true;
  };
  for (const auto& [key, drift] : report.drifts) hears(key, report_of(key, drift));
  // Its state is served no longer, though its process lives: it registers anew, with everything that it needs for that.
  for (const auto& [key, instance] : report.failed)
    if (const auto failed = find_trainer(key); failed != trainers_.end())
      if (const auto rank = machine_.ranks().find(failed->first);
          rank != machine_.ranks().end() && rank->second.up.instance() == instance)
        drop_soon(failed->second, "its state could not be read");
  // The process may be another one by now: the instance that caught up goes along, and Node compares it.
  for (const auto& completed : report.caught_up)
    if (hears(completed.key, report_of(completed)))
      spdlog::info("replica {} rank {} has caught up", completed.key.replica, completed.key.rank);
}

}  // namespace rejoin::daemon
