#include "bench/meeting.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <new>

#include "base/fail.h"

namespace rejoin::bench {

namespace {

std::atomic<Meeting*> watched = nullptr;  // by the handler

void on_child(int, siginfo_t* info, void*) {
  if (info->si_code == CLD_EXITED && info->si_status == 0) return;
  if (auto* meeting = watched.load()) meeting->failed.store(1);
}

}  // namespace

Result<MeetingPage> MeetingPage::make() {
  auto memory = make_sealed_memfd("meeting", sizeof(Meeting));
  if (!memory) return tl::unexpected(memory.error());
  auto mapping = Mapping::of(*memory, sizeof(Meeting));
  if (!mapping) return tl::unexpected(mapping.error());
  watched.store(new (mapping->data()) Meeting{});
  struct sigaction action {};
  action.sa_sigaction = on_child;
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NOCLDSTOP;
  if (::sigaction(SIGCHLD, &action, nullptr) != 0) return fail_errno("SIGCHLD");
  return MeetingPage(std::move(*mapping));
}

MeetingPage::~MeetingPage() {
  if (mapping_.data() != nullptr) watched.store(nullptr);
}

Meeting& MeetingPage::operator*() const { return *std::launder(reinterpret_cast<Meeting*>(mapping_.data())); }

std::uint32_t cores() {
  const auto found = ::sysconf(_SC_NPROCESSORS_ONLN);
  return found > 0 ? static_cast<std::uint32_t>(found) : 1;
}

tl::unexpected<Error> another_failed() { return fail(ErrorCode::cancelled, "another process failed"); }

bool meet(Meeting& meeting, std::uint32_t count) {
  const std::uint32_t round = meeting.round.load();
  if (meeting.arrived.fetch_add(1) + 1 == count) {
    meeting.arrived.store(0);
    meeting.round.fetch_add(1);
    return meeting.failed.load() == 0;
  }
  static const int most = count <= cores() ? 1000 : 0;
  for (int spins = 0; meeting.round.load() == round; ++spins) {
    if (meeting.failed.load() != 0) return false;
    if (spins >= most) ::sched_yield();
  }
  return true;
}

std::vector<double> gather(Meeting& meeting, std::uint32_t rank, std::uint32_t count, double value) {
  meeting.values[rank].store(value);
  if (!meet(meeting, count)) return {};
  std::vector<double> all(count);
  for (std::uint32_t i = 0; i < count; ++i) all[i] = meeting.values[i].load();
  if (!meet(meeting, count)) return {};  // nobody overwrites what others have not read
  return all;
}

}  // namespace rejoin::bench
