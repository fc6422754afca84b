#include "rejoin/report_queue.h"

#include "base/bytes.h"
#include "base/unix_socket.h"
#include "local.pb.h"

namespace rejoin {

// All others are made once for each message of the daemon's, which a daemon that stands sends none of.
bool ReportQueue::repeats(const proto::FromNode& report) {
  return report.has_heartbeat() || report.has_links() || report.has_accusation();
}

ReportQueue::Key ReportQueue::key_of(const proto::FromNode& report) {
  const auto& accusation = report.accusation();
  return {static_cast<int>(report.kind_case()), accusation.suspect(), accusation.lost(), accusation.only_waiting()};
}

void ReportQueue::add(proto::FromNode report) {
  const auto at = waiting_.insert(waiting_.end(), std::move(report));
  if (!repeats(*at)) return;
  const auto [one, fresh] = repeated_.try_emplace(key_of(*at), at);
  if (fresh) return;
  waiting_.erase(one->second);
  one->second = at;
}

Result<> ReportQueue::send(const Fd& daemon) {
  for (; !waiting_.empty(); waiting_.pop_front()) {
    proto::FromTrainer message;
    *message.mutable_report() = waiting_.front();
    const std::string bytes = message.SerializeAsString();
    if (auto sent = send_with_fds(daemon, as_bytes(bytes), {}); !sent) {
      if (sent.error().code == ErrorCode::exhausted) return {};  // it has much to read: again later
      return sent;
    }
    if (repeats(waiting_.front())) repeated_.erase(key_of(waiting_.front()));
  }
  return {};
}

void ReportQueue::clear() {
  waiting_.clear();
  repeated_.clear();
}

}  // namespace rejoin
