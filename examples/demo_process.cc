#include "examples/demo_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::demo {

Result<pid_t> spawn(std::vector<std::string> arguments, const std::string& output) {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return fail_errno("fork");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nothing outlives the demo
    if (::getppid() != parent) ::_exit(127);
    const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, 0);
    ::dup2(out, 1);
    ::dup2(out, 2);
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  return pid;
}

void end(pid_t pid) {
  if (pid <= 0) return;
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

std::string get(const std::string& address, const std::string& path, std::chrono::milliseconds patience) {
  const auto colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  if (colon == std::string::npos || ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1)
    return "";
  to.sin_port = htons(static_cast<std::uint16_t>(std::atoi(address.c_str() + colon + 1)));
  const Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit{.tv_sec = patience.count() / 1000, .tv_usec = patience.count() % 1000 * 1000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const std::string question = fmt::format("GET {} HTTP/1.0\r\nHost: {}\r\nConnection: close\r\n\r\n", path, address);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0 ||
      ::send(socket.get(), question.data(), question.size(), MSG_NOSIGNAL) <= 0)
    return "";
  std::string answer;
  std::array<char, 4096> bytes{};
  for (ssize_t got = 0; (got = ::recv(socket.get(), bytes.data(), bytes.size(), 0)) != 0;) {
    if (got < 0) return "";
    answer.append(bytes.data(), static_cast<std::size_t>(got));
  }
  const auto body = answer.find("\r\n\r\n");
  return body == std::string::npos ? "" : answer.substr(body + 4);
}

}  // namespace rejoin::demo
