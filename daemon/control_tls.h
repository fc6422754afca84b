// TLS 1.3 for control connections, and the proof of the job key on them.
//
// Without certificates the handshake is one with a pre-shared key that is derived from the job key (RFC 8446, section
// 2.2): both sides prove in it that they know it, before the server has spent more than that on the client. The session
// keys also come from an ephemeral exchange (psk_dhe_ke), so that who learns the job key later can't read what was
// said.
//
// With certificates both sides show one. TLS 1.3 has no handshake with both, so that the key is proven inside of the
// channel: the client first, then the server, each by an HMAC under a key derived from the job key of what only this
// channel exports (RFC 8446, section 7.5). A proof is worth nothing on any other connection, and none in the other
// direction.
#pragma once

#include <openssl/ssl.h>

#include <asio/ssl/context.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/proof.h"
#include "base/refusals.h"
#include "base/seldom.h"
#include "daemon/auth.h"

namespace rejoin::daemon {

struct JobKeys::ControlTls {
  using KeyName = std::array<std::byte, 8>;
  struct ClientProof {
    KeyName key;
    Mac mac;
  };

  // Where `files` are given, its context has no certificates yet: see make().
  explicit ControlTls(std::shared_ptr<const std::vector<JobKey>> keys, CertificateFiles files = {});
  // Makes one with certificates, read from `files`. Errors: those of use_certificates().
  static Result<std::shared_ptr<const ControlTls>> make(std::shared_ptr<const std::vector<JobKey>> keys,
                                                        const CertificateFiles& files);
  ~ControlTls();
  ControlTls(const ControlTls&) = delete;
  ControlTls& operator=(const ControlTls&) = delete;

  // Returns the context for the next connection. It reads certificates again that have changed. Where the new ones
  // can't be used those read before stay, a line in the log says so, and they are tried again now and then: time may
  // cure what is wrong with them.
  asio::ssl::context& context() const;
  const CertificateFiles& files() const { return files_; }
  // The certificate in use; null: there are none.
  const OwnCertificate* own() const { return own_ ? &*own_ : nullptr; }
  // Reads what has changed also where nobody connects. Logs once a day that the certificate in use ends soon, and once
  // an hour that it has ended.
  void look_after() const;

  // Says whether a handshake that is done has proven the job key; with certificates it never has.
  bool proved_the_key(const SSL* connection) const;
  // A client calls this for its proof, by its own key.
  ClientProof prove(SSL* connection) const;
  // A server calls this for its proof to a client that has proven one of the keys; nothing where it has not.
  std::optional<Mac> answer(SSL* connection, const ClientProof& proof) const;
  // A client calls this to see whether the server has proven the client's own key.
  bool is_answer(SSL* connection, const Mac& proof) const;

  // Says for people why a handshake has failed, where the other side has caused it; nothing where the connection has
  // ended.
  struct Refusal {
    refusals::Why kind;
    std::string text;
  };
  std::optional<Refusal> why_refused(const asio::error_code& error, const PeerCertificate& peer) const;

 private:
  struct Key;
  std::unique_ptr<asio::ssl::context> new_context() const;

  std::unique_ptr<const std::vector<Key>> keys_;
  CertificateFiles files_;
  static constexpr Duration kSoonSaidAgainAfter = std::chrono::hours(24), kEndSaidAgainAfter = std::chrono::hours(1);
  mutable std::unique_ptr<asio::ssl::context> context_;
  mutable std::optional<OwnCertificate> own_;
  mutable std::optional<FileStamps> read_;  // what the files were when they were read last
  struct Failure {
    std::string why;
    TimePoint at;
  };
  mutable std::optional<Failure> failed_;  // of those that were read last
  mutable Seldom ends_soon_{kSoonSaidAgainAfter}, has_ended_{kEndSaidAgainAfter};
};

}  // namespace rejoin::daemon
