// Descriptors over unix sockets, and who is at the other end.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/fd.h"

namespace rejoin {

struct PeerCredentials {
  pid_t pid = 0;  // 0: of another PID namespace
  uid_t uid = 0;
  bool unknown = false;  // it has our user's number, as all have that this user namespace does not know

  std::string user() const;  // in words
};
// Who called connect(), or listen(). Numbers of users are those of this user namespace.
Result<PeerCredentials> peer_credentials(const Fd& socket);

// Whether that is a process of this user, reached at the socket `name`. Whose user is unknown is taken only from
// another PID namespace, and where the socket is a file, which has an owner and a mode.
bool of_this_user(const PeerCredentials& peer, const std::string& name);
// Whether other users may have this process's number here: that of all whom a user namespace does not know, 65534
// (user_namespaces(7)).
bool shares_its_number();

constexpr std::size_t kMaxFds = 128;  // in one datagram; Linux takes 253

// `name` beginning with '@' is abstract (no file). SEQPACKET: whole messages.
Result<> check_unix_name(const std::string& name);  // whether it can be one
// The same socket's name for a process that changes its directory; as it is, where that would be too long.
std::string from_anywhere(const std::string& name);
// In the place of a socket of ours on which nobody listens any more; any other file there stays, and is an error.
Result<Fd> listen_unix(const std::string& name);
// Never waits, and neither does its socket. Errors leave errno as it was: `timeout` where the listener is stopped, or
// so busy that no more can wait for it; `unavailable`.
Result<Fd> connect_unix(const std::string& name);

// The file of a socket that listens, as it was bound: removed at the end, unless another has been bound in its place.
// To be destroyed before the socket is closed: until then no other file can have its inode.
class SocketFile {
 public:
  explicit SocketFile(std::string name);  // right after listen_unix()
  ~SocketFile();
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;
  bool in_place() const;  // nobody has removed it, nor put another file there

 private:
  const std::string name_;
  std::optional<std::pair<dev_t, ino_t>> bound_;  // nothing where it is abstract
};

// Sends one message with descriptors (which stay the caller's). Errors: `exhausted` (again later), `unavailable` (the
// peer is gone), `io` (this message is lost).
Result<> send_with_fds(const Fd& socket, BytesView bytes, const std::vector<int>& fds);

struct Received {
  Bytes bytes;
  std::vector<Fd> fds;
};
// The next message; nothing where none is there; `unavailable` when the peer has closed, `io` where the system can't
// say.
Result<std::optional<Received>> receive_with_fds(const Fd& socket, std::size_t limit);

}  // namespace rejoin
