// Reads the certificates for control connections: this process's own, and the one of the CA whose signature it takes on
// those of others. They are in files, which are read again when they have changed.
#pragma once

#include <openssl/ssl.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/result.h"

namespace rejoin {
class CommandLine;
}

namespace rejoin::daemon {

struct CertificateFiles {
  std::string ca, cert, key;  // all of them, or none
  bool given() const { return !cert.empty(); }
};
void bind(CommandLine& line, CertificateFiles& files);
// Says whether the files go together.
Result<> check(const CertificateFiles& files);

// Tells whether the files have changed since they were read last.
class FileStamps {
 public:
  explicit FileStamps(const CertificateFiles& files);
  bool operator==(const FileStamps&) const = default;

 private:
  struct Stamp {
    ino_t file = 0;
    off_t bytes = 0;
    std::int64_t modified = 0, changed = 0;  // ns
    bool operator==(const Stamp&) const = default;
  };
  std::array<Stamp, 3> stamps_{};
};

using WallTime = std::chrono::sys_seconds;
struct OwnCertificate {
  std::string text;  // for people: whose it is, and until when it is valid
  // When it is valid, together with those of the CAs that lead to it.
  WallTime from, until;
  // Within a week or, of one that lives for less than three, the last third of its life; also where it has ended.
  bool ends_soon(std::chrono::system_clock::time_point now) const;
};
// Gives a context the own certificate with its key, and the CA's, and makes it ask whoever is at the other end for a
// certificate. Errors name the file and the remedy: it can't be read, others may read the key, the key does not fit,
// the certificate is not valid now.
Result<OwnCertificate> use_certificates(SSL_CTX* context, const CertificateFiles& files);

// Whether a file that another library is to read has certificates, or a private key, in PEM form, and nothing of it is
// damaged. Errors name it by `flag`, with the remedy.
Result<> check_certificates(const char* flag, const std::string& path);
Result<> check_private_key(const char* flag, const std::string& path);  // nor may others read it

// What one handshake has to know of the other side's certificate, and what it has found. It outlives the handshake.
struct PeerCertificate {
  const CertificateFiles* files = nullptr;
  std::string host;                        // the host that a server's certificate must be for
  std::optional<std::string> why_refused;  // for people
};
// Examines the certificate that the other side shows. A server's must be for peer.host, a name or an IP address; our
// own certificate is taken, too, since only this process, or who shares its key, can show it.
void examine(SSL* connection, PeerCertificate& peer, bool server);

}  // namespace rejoin::daemon
