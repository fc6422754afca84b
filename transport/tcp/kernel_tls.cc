#include "transport/tcp/kernel_tls.h"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/no_signals.h"

namespace rejoin::transport::tcp::kernel_tls {

namespace {

constexpr unsigned char kHandshake = 22;
// As a handshake message of TLS: its type, which nobody has given out, and its length. Not TLS's own KeyUpdate: Linux
// since 6.14 would wait for the next key behind that.
constexpr std::array<unsigned char, 4> kHandover{255, 0, 0, 0};
constexpr int kExpectNoPadding = 4;  // TLS_RX_EXPECT_NO_PAD, of Linux 6.0

using Control = std::array<char, CMSG_SPACE(sizeof(unsigned char))>;

Result<std::pair<Fd, Fd>> connected_with_itself() {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), near(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  if (!listener || !near || ::bind(listener.get(), where, sizeof address) != 0 || ::listen(listener.get(), 1) != 0 ||
      ::getsockname(listener.get(), where, &length) != 0 || ::connect(near.get(), where, sizeof address) != 0)
    return fail_errno("a connection over the loopback interface");
  Fd far(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!far) return fail_errno("a connection over the loopback interface");
  return std::pair{std::move(near), std::move(far)};
}

Result<> try_it() {
  auto both = connected_with_itself();
  if (!both) return tl::unexpected(both.error());
  for (const Fd* end : {&both->first, &both->second})
    if (auto attached = attach(*end); !attached) return attached;
  if (auto begun = begin(both->first, Direction::out, {}); !begun) return begun;
  return begin(both->second, Direction::in, {});
}

}  // namespace

const Result<>& available() {
  static const Result<> there = [] {
    const NoSignals uninterrupted;  // of a thread of the program's, which may take signals at any time
    return try_it();
  }();
  return there;
}

Result<> attach(const Fd& socket) {
  constexpr std::string_view name = "tls";
  if (::setsockopt(socket.get(), IPPROTO_TCP, TCP_ULP, name.data(), name.size()) == 0) return {};
  if (errno == ENOENT)
    return fail(ErrorCode::unavailable,
                "this kernel has no kTLS: as root, 'modprobe tls' where it has that module (CONFIG_TLS)");
  return fail(ErrorCode::unavailable, "the kernel takes no records of this connection: {}", std::strerror(errno));
}

Result<> begin(const Fd& socket, Direction direction, const Key& key) {
  tls12_crypto_info_aes_gcm_256 info{};  // of TLS 1.3, too
  info.info.version = TLS_1_3_VERSION;
  info.info.cipher_type = TLS_CIPHER_AES_GCM_256;
  static_assert(sizeof info.salt + sizeof info.iv == sizeof key.iv && sizeof info.key == sizeof key.cipher);
  std::memcpy(info.key, key.cipher.data(), sizeof info.key);
  std::memcpy(info.salt, key.iv.data(), sizeof info.salt);
  std::memcpy(info.iv, key.iv.data() + sizeof info.salt, sizeof info.iv);
  const int name = direction == Direction::out ? TLS_TX : TLS_RX;
  if (::setsockopt(socket.get(), SOL_TLS, name, &info, sizeof info) != 0)
    return fail(ErrorCode::unavailable, "the kernel's TLS does not take AES-256-GCM for what goes {}: {}",
                direction == Direction::out ? "out" : "in", std::strerror(errno));
  // Nobody here pads: so the kernel can open a record straight into its place. Where it does not know this it copies.
  const int none = 1;
  if (direction == Direction::in) (void)::setsockopt(socket.get(), SOL_TLS, kExpectNoPadding, &none, sizeof none);
  return {};
}

bool send_handover(const Fd& socket) {
  iovec part{const_cast<unsigned char*>(kHandover.data()), kHandover.size()};
  alignas(cmsghdr) Control control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* kind = CMSG_FIRSTHDR(&message);
  kind->cmsg_level = SOL_TLS;
  kind->cmsg_type = TLS_SET_RECORD_TYPE;
  kind->cmsg_len = CMSG_LEN(sizeof kHandshake);
  *CMSG_DATA(kind) = kHandshake;
  const ssize_t sent = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0 && static_cast<std::size_t>(sent) != kHandover.size()) errno = EIO;
  return static_cast<std::size_t>(sent) == kHandover.size();
}

ssize_t receive(const Fd& socket, msghdr message, bool& handed_over) {
  alignas(cmsghdr) Control control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  handed_over = false;
  const ssize_t got = ::recvmsg(socket.get(), &message, MSG_DONTWAIT);
  if (got < 0) {
    // A record that is damaged, too long, or of another version or kind than was asked for.
    if (errno == EMSGSIZE || errno == EINVAL || errno == EIO || errno == EPROTO) errno = EBADMSG;
    return got;
  }
  const cmsghdr* kind = CMSG_FIRSTHDR(&message);
  if (kind == nullptr || std::byte{*CMSG_DATA(kind)} == kApplicationData) return got;
  std::array<unsigned char, kHandover.size()> came{};
  std::size_t there = 0;
  for (std::size_t i = 0; i < message.msg_iovlen && there < came.size(); ++i) {
    const std::size_t step = std::min(message.msg_iov[i].iov_len, came.size() - there);
    std::memcpy(came.data() + there, message.msg_iov[i].iov_base, step);
    there += step;
  }
  handed_over = *CMSG_DATA(kind) == kHandshake && static_cast<std::size_t>(got) == came.size() && came == kHandover;
  if (handed_over) return got;
  errno = EBADMSG;
  return -1;
}

}  // namespace rejoin::transport::tcp::kernel_tls
