// What `rejoin doctor` makes of the daemon's socket.
#include <cerrno>
#include <cstring>

#include "base/fail.h"
#include "daemon/doctor.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

namespace {

Finding not_connected(const std::string& socket, int error) {
  const auto fails = [&](std::string found, std::string remedy) {
    return Finding{Verdict::fail, "socket", std::move(found), std::move(remedy)};
  };
  switch (error) {
    case ENOENT:
      return fails(
          fmt::format("there is no {}", socket),
          "start rejoind with this --socket, or give the one that it has; a container must mount its directory");
    case ECONNREFUSED:
      return fails(fmt::format("nobody listens at {}", socket),
                   "start rejoind with this --socket: it removes a socket that was left behind");
    case EAGAIN:
      return fails(fmt::format("too many wait at {} to be accepted", socket),
                   "whoever listens there is stopped or overloaded: look at it, and start it again");
    case EACCES:
      return fails(fmt::format("this user may not connect to {}", socket), "run rejoind and its trainers as one user");
    case ENOTSOCK: return fails(fmt::format("{} is no socket", socket), "give rejoind's --socket");
    default: return fails(fmt::format("{}: {}", socket, std::strerror(error)), "look at rejoind's log");
  }
}

}  // namespace

void examine_socket(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  if (s.socket.empty()) return findings.push_back({Verdict::skipped, "socket", "no --socket", ""});
  const auto facts = probes.socket(s.socket);
  if (facts.error != 0) return findings.push_back(not_connected(s.socket, facts.error));
  const auto say = [&](Verdict verdict, std::string found, std::string remedy) {
    findings.push_back({verdict, "socket", std::move(found), std::move(remedy)});
  };
  // The trainer takes its own user's daemon alone.
  if (facts.user != facts.own_user)
    return say(Verdict::fail,
               fmt::format("{} is of user {}'s daemon, and this is user {}", s.socket, facts.user, facts.own_user),
               "run rejoind and its trainers as one user, with --socket in a directory that only that user can write");
  if (!facts.user_known)
    return say(
        Verdict::fail,
        fmt::format("{} is of a daemon whose user this user namespace does not know: it calls all such users {}, "
                    "and this one so, too",
                    s.socket, facts.user),
        "run rejoind and its trainers as one user that has a number of its own, or with --socket in a directory "
        "that only that user can write");
  if (!facts.answer)
    return say(
        Verdict::fail,
        fmt::format("process {} listens at {}, and says nothing in {} ms", facts.process, s.socket, s.patience.count()),
        "it is stopped, overloaded, or no rejoind: look at it, and start it again");
  if (!facts.answer->empty()) {
    const auto [why, remedy] = split_at_upgrade(*facts.answer);
    return say(Verdict::fail, fmt::format("{} refuses: {}", s.socket, why), remedy);
  }
  if (facts.process == 0 || !facts.same_processes)
    return say(s.transport == "shm" ? Verdict::fail : Verdict::warn,
               fmt::format("the daemon at {} is of another PID namespace, so that neither sees the other's process, "
                           "and the transport shm can't be used",
                           s.socket),
               "let both share one: Kubernetes: shareProcessNamespace: true in one pod, hostPID: true across pods; "
               "Docker: --pid");
  say(Verdict::ok,
      fmt::format("process {} answers at {} and is of this version, user and PID namespace", facts.process, s.socket),
      "");
  if (!facts.no_pidfd.empty())
    say(Verdict::warn,
        fmt::format("no descriptor of the daemon's process is to be had, so that ends show late: {}", facts.no_pidfd),
        "allow pidfd_open (Linux 5.3 or later; the container's seccomp profile)");
  if (!facts.no_reading.empty())
    say(Verdict::warn,
        fmt::format("process_vm_readv is refused, which the transport shm needs for memory that a trainer has "
                    "allocated itself: {}",
                    facts.no_reading),
        "allow process_vm_readv in the container's seccomp profile");
}

}  // namespace rejoin::daemon
