// The job key, and the keys that are derived from it. Each use has one of its own, so that none tells anything of
// another.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/proof.h"
#include "base/result.h"
#include "daemon/certificates.h"
#include "transport/secret.h"

namespace rejoin::daemon {

// Returns the contents of a file of at most `most` bytes. `what` names it in errors, as in "job key file".
Result<std::string> read_file(const std::string& what, const std::string& path, std::size_t most);
// Returns the contents of a file that holds a secret, without the ends of lines behind it. Errors: also where others
// may read the file.
Result<std::string> read_secret(const std::string& what, const std::string& path, std::size_t most = 4096);

class JobKey {
 public:
  // Reads a key of at least 16 bytes from a file that only its owner can read, or root and a group of this process
  // (modes 0440 and 0640).
  static Result<JobKey> read(const std::string& path);
  explicit JobKey(std::string key) : key_(std::move(key)) {}

  Mac derive(std::string_view purpose) const;
  // Returns the secret that ranks and daemons of the job prove to each other on data connections.
  transport::Secret data_secret() const;
  bool operator==(const JobKey&) const = default;

 private:
  std::string key_;
};

// The keys of a process: the one that it proves, perhaps a second one that others may prove to it while a job's key is
// being changed, and perhaps certificates for control connections.
class JobKeys {
 public:
  // Reads the keys; `other_path` is empty where there is one. Errors name the file and the remedy.
  static Result<JobKeys> read(const std::string& path, const std::string& other_path,
                              const CertificateFiles& files = {});
  explicit JobKeys(JobKey own, std::optional<JobKey> other = {});
  // Adds certificates that check() has let pass. Errors: those of use_certificates().
  static Result<JobKeys> with_certificates(JobKeys keys, const CertificateFiles& files);

  transport::Secrets data_secrets() const;
  // Returns the marks by which coordinators that share a store know that they are of one job (proto::Leader), the own
  // key's first.
  std::vector<std::uint64_t> store_marks() const;
  struct ControlTls;
  const ControlTls& control() const { return *control_; }  // for Framed

 private:
  static Result<JobKeys> read_keys(const std::string& path, const std::string& other_path);
  std::shared_ptr<const std::vector<JobKey>> all_;  // the own one first
  std::shared_ptr<const ControlTls> control_;
};

}  // namespace rejoin::daemon
