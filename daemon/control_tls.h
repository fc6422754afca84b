// TLS 1.3 for control connections, with a pre-shared key that is derived from the job key (RFC 8446, section 2.2): both
// sides prove in the handshake that they know it, before the server has spent more than that on the client. The session
// keys also come from an ephemeral exchange (psk_dhe_ke), so that who learns the job key later can't read what was
// said.
#pragma once

#include <openssl/ssl.h>

#include <asio/ssl/context.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/auth.h"

namespace rejoin::daemon {

struct JobKeys::ControlTls {
  explicit ControlTls(std::shared_ptr<const std::vector<JobKey>> keys);
  ~ControlTls();
  ControlTls(const ControlTls&) = delete;
  ControlTls& operator=(const ControlTls&) = delete;

  asio::ssl::context& context() const { return context_; }

 private:
  struct PresharedKey;
  mutable asio::ssl::context context_;
  std::unique_ptr<const std::vector<PresharedKey>> keys_;
};

// Whether a handshake that is done was one by a pre-shared key, and so by one of ours.
bool proved_the_key(const SSL* connection);

// Why a handshake has failed, for people, where that is the other side's doing; nothing where the connection has ended.
std::optional<std::string> why_refused(const asio::error_code& error);

}  // namespace rejoin::daemon
