#include "base/unix_socket.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin {

Result<> check_unix_name(const std::string& name) {
  constexpr std::size_t most = sizeof(sockaddr_un::sun_path) - 1;
  if (name.empty() || name.size() > most)
    return fail(ErrorCode::invalid_argument, "socket name '{}' must have 1 to {} characters", name, most);
  if (name == "@")  // the kernel would choose one
    return fail(ErrorCode::invalid_argument, "socket name '@' is that of no socket: an abstract one is '@name'");
  return {};
}

std::string from_anywhere(const std::string& name) {
  std::error_code error;
  const std::string whole = name.starts_with('@') ? name : std::filesystem::absolute(name, error).string();
  return error || !check_unix_name(whole) ? name : whole;
}

namespace {

Result<std::pair<sockaddr_un, socklen_t>> unix_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (auto right = check_unix_name(name); !right) return tl::unexpected(right.error());
  std::memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = '\0';
  return std::pair(address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size()));
}

// Removes what a daemon that died has left, and nothing else: a socket of ours on which nobody listens.
Result<> remove_left_socket(const std::string& name) {
  struct stat status {};
  if (::lstat(name.c_str(), &status) != 0) return fail_errno(fmt::format("binding {}", name));
  if (!S_ISSOCK(status.st_mode))
    return fail(ErrorCode::invalid_argument,
                "{} exists and is no socket: it is left as it is; choose another path "
                "for the socket",
                name);
  if (status.st_uid != ::geteuid())
    return fail(ErrorCode::invalid_argument,
                "{} is a socket of user {}: it is left as it is; choose another path for "
                "the socket",
                name, status.st_uid);
  // Other errors than a refusal come from sockets that are in use: of another type, or with a full backlog.
  const bool connected = connect_unix(name).has_value();
  if (!connected && without_descriptors(errno)) return fail_errno(fmt::format("looking who is at {}", name));
  if (connected || errno != ECONNREFUSED)
    return fail(ErrorCode::exhausted, "{} is in use by a running process; stop it or choose another socket", name);
  if (::unlink(name.c_str()) != 0) return fail_errno(fmt::format("removing {}", name));
  return {};
}

std::optional<std::pair<dev_t, ino_t>> file_at(const std::string& name) {
  struct stat status {};
  if (name.empty() || name[0] == '@' || ::lstat(name.c_str(), &status) != 0) return std::nullopt;
  return std::pair(status.st_dev, status.st_ino);
}

// The kernel decides by its own numbers of users. `pid` may be another's by now, where the kernel (before 6.5) has no
// descriptor of the process itself.
bool may_signal(const Fd& socket, pid_t pid) {
  constexpr int kPeerPidfd = 77;  // SO_PEERPIDFD
  int process = -1;
  socklen_t length = sizeof process;
  if (::getsockopt(socket.get(), SOL_SOCKET, kPeerPidfd, &process, &length) == 0) {
    const Fd owned(process);
    if (::syscall(SYS_pidfd_send_signal, process, 0, nullptr, 0) == 0) return true;
    if (errno != ENOSYS) return false;
  } else if (errno != ENOPROTOOPT) {  // it has ended, for instance
    return false;
  }
  return ::kill(pid, 0) == 0;
}

}  // namespace

SocketFile::SocketFile(std::string name) : name_(std::move(name)), bound_(file_at(name_)) {}

SocketFile::~SocketFile() {
  if (bound_ && in_place()) ::unlink(name_.c_str());
}

bool SocketFile::in_place() const { return !bound_ || file_at(name_) == bound_; }

Result<PeerCredentials> peer_credentials(const Fd& socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return fail_errno("SO_PEERCRED");
  const bool alike = credentials.uid == ::geteuid() && shares_its_number();
  return PeerCredentials{credentials.pid, credentials.uid,
                         alike && !(credentials.pid > 0 && may_signal(socket, credentials.pid))};
}

bool shares_its_number() {
  static const uid_t unknown = [] {
    uid_t number = 65534;
    std::ifstream("/proc/sys/kernel/overflowuid") >> number;
    return number;
  }();
  if (::geteuid() != unknown) return false;
  std::ifstream map("/proc/self/uid_map");
  std::uint64_t inside = 0, outside = 0, count = 0;
  return !(map >> inside >> outside >> count) || inside != 0 || outside != 0 || count < ~std::uint32_t{0};
}

bool of_this_user(const PeerCredentials& peer, const std::string& name) {
  return peer.uid == ::geteuid() && (!peer.unknown || (peer.pid == 0 && !name.starts_with('@')));
}

std::string PeerCredentials::user() const {
  if (!unknown) return fmt::format("user {}", uid);
  return fmt::format("user {} (so this user namespace calls all users that it does not know: run the job as another)",
                     uid);
}

Result<Fd> listen_unix(const std::string& name) {
  auto address = unix_address(name);
  if (!address) return tl::unexpected(address.error());
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno("unix socket");
  // The file will have its socket's mode. Changed later, by its name, it could be another file by then.
  if (name[0] != '@') (void)::fchmod(socket.get(), 0600);
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address->first), address->second) != 0) {
    if (errno != EADDRINUSE || name[0] == '@') return fail_errno(fmt::format("binding {}", name));
    if (auto removed = remove_left_socket(name); !removed) return tl::unexpected(removed.error());
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address->first), address->second) != 0)
      return fail_errno(fmt::format("binding {}", name));
  }
  // Few, since a caller that waits to be accepted may have sent descriptors, of which the system lets a user have no
  // more under way than a process may have: who is turned away comes again.
  if (::listen(socket.get(), 128) != 0) return fail_errno("listen");
  return socket;
}

Result<Fd> connect_unix(const std::string& name) {
  auto address = unix_address(name);
  if (!address) return tl::unexpected(address.error());
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) return fail_errno("unix socket");
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address->first), address->second) != 0) {
    const int saved = errno;
    auto failed =
        saved == EAGAIN
            ? fail(ErrorCode::timeout, "{} is stopped, or has much to do: too many wait there to be accepted", name)
            : fail(ErrorCode::unavailable, "nobody answers at {}: {}", name, std::strerror(saved));
    socket.reset();
    errno = saved;  // for who asks why
    return failed;
  }
  return socket;
}

namespace {

Error error_of_socket(const char* what) {
  const int error = errno;
  if (error == EPIPE || error == ECONNRESET || error == ENOTCONN)
    return {ErrorCode::unavailable, fmt::format("the peer is gone: {}", std::strerror(error))};
  return {ErrorCode::io, fmt::format("{}: {}", what, std::strerror(error))};
}

}  // namespace

Result<> send_with_fds(const Fd& socket, BytesView bytes, const std::vector<int>& fds) {
  REJOIN_CHECK(fds.size() <= kMaxFds);
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return {};
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
      return fail(ErrorCode::exhausted, "the peer does not read its socket");
    if (errno == ETOOMANYREFS)
      return fail(ErrorCode::exhausted,
                  "too many descriptors of this user are under way between processes; raise 'ulimit -n'");
    return tl::unexpected(error_of_socket("a message could not be sent to it"));
  }
}

namespace {

// A peer may close with messages of ours unread. The kernel reports that as ECONNRESET, once, ahead of the messages
// that the peer had sent before.
template <typename Receive>
ssize_t even_of_one_that_closed(Receive receive) {
  for (bool closed = false;;) {
    const ssize_t got = receive();
    if (got >= 0 || (errno != EINTR && (errno != ECONNRESET || std::exchange(closed, true)))) return got;
  }
}

}  // namespace

Result<std::optional<Received>> receive_with_fds(const Fd& socket, std::size_t limit) {
  // Its length first: most calls find nothing, and few messages are as long as the limit.
  const auto look = [&] { return ::recv(socket.get(), nullptr, 0, MSG_DONTWAIT | MSG_PEEK | MSG_TRUNC); };
  const ssize_t length = even_of_one_that_closed(look);
  if (length < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::optional<Received>{};
  if (length < 0) return tl::unexpected(error_of_socket("its messages can't be read"));
  Received received;
  received.bytes.resize(std::min(limit, static_cast<std::size_t>(length)));
  iovec part{received.bytes.data(), received.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto receive = [&] { return ::recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); };
  const ssize_t got = even_of_one_that_closed(receive);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::optional<Received>{};
  for (cmsghdr* header = got >= 0 ? CMSG_FIRSTHDR(&message) : nullptr; header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
      received.fds.emplace_back(fd);
    }
  }
  if (got < 0) return tl::unexpected(error_of_socket("its messages can't be read"));
  if (got == 0) return fail(ErrorCode::unavailable, "the peer closed the connection");
  if ((message.msg_flags & MSG_CTRUNC) != 0)
    return fail(ErrorCode::exhausted,
                "there are too few descriptors left here for those that it sends; raise the limit with 'ulimit -n'");
  if ((message.msg_flags & MSG_TRUNC) != 0)
    return fail(ErrorCode::corrupt, "a message over the limit of {}", human_bytes(limit));
  received.bytes.resize(static_cast<std::size_t>(got));
  return std::optional(std::move(received));
}

}  // namespace rejoin
