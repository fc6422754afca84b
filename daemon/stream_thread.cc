#include "daemon/stream_thread.h"

#include "base/priority.h"
#include "base/start_thread.h"
#include "transport/advertise.h"
#include "transport/factory.h"
#include "transport/idle.h"
#include "transport/placement.h"

namespace rejoin::daemon {

namespace {
constexpr Duration kReportEvery = std::chrono::milliseconds(20);
}

Result<std::unique_ptr<StreamThread>> StreamThread::start(const std::string& transport,
                                                          const std::shared_ptr<device::Device>& device, bool near,
                                                          const std::string& listen, const transport::Secrets& secrets,
                                                          const catchup::Service::Options& options,
                                                          std::function<void(Report)> report) {
  std::unique_ptr<StreamThread> stream(new StreamThread());
  if (near) stream->numa_node_ = transport::numa_node_for(transport, device->address());
  const transport::RunNear running_near(stream->numa_node_);  // what it allocates is there
  Result<std::unique_ptr<transport::Engine>> engine;
  std::thread maker;
  const auto made = start_thread(maker, [&] {
    let_training_go_first();  // threads that the engine starts have the priority of this one
    engine = transport::make_engine(transport, device);
  });
  if (!made) return tl::unexpected(made.error());
  maker.join();
  if (!engine) return tl::unexpected(engine.error());
  (*engine)->set_secrets(secrets);
  (*engine)->set_silence(options.silence);
  auto address = transport::listen_as(**engine, {listen}, "--data-listen");
  if (!address) return tl::unexpected(address.error());
  auto wake = make_eventfd();
  if (!wake) return tl::unexpected(wake.error());
  stream->engine_ = std::move(*engine);
  stream->address_ = address->text;
  stream->wake_ = std::move(*wake);
  stream->report_ = std::move(report);
  stream->silence_ = options.silence;
  stream->service_ = std::make_unique<catchup::Service>(*stream->engine_, secrets.own, options, stream->clock_);
  if (auto started = start_thread(stream->thread_, [raw = stream.get()] { raw->run(); }); !started)
    return tl::unexpected(started.error());
  return stream;
}

void StreamThread::stop() {
  stop_ = true;
  if (wake_) signal_eventfd(wake_);
}

StreamThread::~StreamThread() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void StreamThread::post(Command command) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({std::move(command), {}});
  }
  signal_eventfd(wake_);
}

void StreamThread::post_latest(catchup::RankKey about, Command command) {
  {
    const std::lock_guard lock(mutex_);
    auto before = commands_.rbegin();
    while (before != commands_.rend() && before->latest_about && *before->latest_about != about) ++before;
    if (before != commands_.rend() && before->latest_about) before->command = std::move(command);
    else commands_.push_back({std::move(command), about});
  }
  signal_eventfd(wake_);
}

void StreamThread::run() {
  let_training_go_first();
  const transport::RunNear running_near(numa_node_);
  transport::Idle idle(*engine_);
  TimePoint reported{};
  bool served = false;  // somebody, by the last report
  while (!stop_) {
    turns_.fetch_add(1, std::memory_order_relaxed);
    std::vector<Queued> commands;
    {
      const std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    const TimePoint now = clock_.now();
    for (auto& queued : commands) {
      queued.command(*service_, now);
      turns_.fetch_add(1, std::memory_order_relaxed);  // each may take long
    }
    Report report{.caught_up = service_->poll(now)};
    report.drifts = service_->take_drifts();
    report.failed = service_->take_failed();
    const auto joining = service_->joining();
    const bool serves = service_->serving() > 0;
    const bool due = (!joining.empty() || serves) && now - reported >= kReportEvery;
    if (!report.caught_up.empty() || !report.drifts.empty() || !report.failed.empty() || due || serves != served) {
      served = serves;
      for (auto key : joining)
        if (auto progress = service_->progress(key, now)) report.progress[key] = *progress;
      report.bytes_served = service_->bytes_served();
      report.bytes_passed_on = service_->bytes_passed_on();
      report.serving = service_->serving_now();
      reported = now;
      report_(std::move(report));
    }
    if (service_->busy()) continue;
    service_->arm_doorbells();
    service_->poll_again(now);  // what changed before the doorbells were armed would ring nobody
    if (service_->busy() || service_->has_news()) continue;
    std::vector<int> fds = service_->doorbells();
    fds.push_back(wake_.get());
    const bool streams = !joining.empty() || service_->serving() > 0;
    const Duration longest = std::min<Duration>(silence_, std::chrono::seconds(1));
    idle.wait(false, service_->wait(now, clock_.now(), streams ? kReportEvery : longest), fds);
    drain_eventfd(wake_);
  }
  service_.reset();
  engine_.reset();
  ends_.set_value();
}

}  // namespace rejoin::daemon
