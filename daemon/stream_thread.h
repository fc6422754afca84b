// The daemon's data plane: for all states in the host's memory, and for each on a GPU, a thread of low priority that
// owns a catch-up engine and service. Everything else talks to it through a queue.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "catchup/service.h"

namespace rejoin::daemon {

class StreamThread {
 public:
  struct Report {
    std::vector<catchup::Service::CompletedRank> caught_up;
    std::vector<std::pair<catchup::RankKey, catchup::Drift>> drifts;
    // Whose device failed, and its instance: they are not served any more.
    std::vector<std::pair<catchup::RankKey, std::uint64_t>> failed;
    std::map<catchup::RankKey, catchup::CatchUpProgress> progress;
    std::uint64_t bytes_served = 0, bytes_passed_on = 0;
    std::vector<std::pair<catchup::RankKey, catchup::Source::Stats>> serving;
  };
  // `report` is called in the stream's thread, which runs near the device or the NICs where `near` is set.
  static Result<std::unique_ptr<StreamThread>> start(const std::string& transport,
                                                     const std::shared_ptr<device::Device>& device, bool near,
                                                     const std::string& listen, const transport::Secrets& secrets,
                                                     const catchup::Service::Options& options,
                                                     std::function<void(Report)> report);
  ~StreamThread();
  void stop();  // begins to: the destructor waits for it
  bool ends_within(Duration longest) const { return ended_.wait_for(longest) == std::future_status::ready; }
  std::uint64_t turns() const { return turns_.load(std::memory_order_relaxed); }  // more each silence, or it stands

  const std::string& address() const { return address_; }
  using Command = std::function<void(catchup::Service&, TimePoint now)>;
  void post(Command command);
  // In place of the one before it for this rank, where that waits still and no other command has come since: so a
  // thread that is at something long finds one of them for each rank.
  void post_latest(catchup::RankKey about, Command command);

 private:
  StreamThread() = default;
  void run();

  SteadyClock clock_;
  std::unique_ptr<transport::Engine> engine_;
  std::unique_ptr<catchup::Service> service_;
  std::string address_;
  std::optional<int> numa_node_;
  Duration silence_{};
  std::function<void(Report)> report_;
  Fd wake_;
  struct Queued {
    Command command;
    std::optional<catchup::RankKey> latest_about;
  };
  std::mutex mutex_;  // guards commands_
  std::vector<Queued> commands_;
  std::atomic<bool> stop_{false};
  std::promise<void> ends_;
  std::future<void> ended_ = ends_.get_future();
  std::atomic<std::uint64_t> turns_{0};
  std::thread thread_;
};

}  // namespace rejoin::daemon
