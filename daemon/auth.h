// The job key, and what is made of it: each use has a key of its own, so that none tells anything of another.
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

// The contents of a file, at most `most` bytes. `what`: for errors, as in "job key file".
Result<std::string> read_file(const std::string& what, const std::string& path, std::size_t most);
// The same of one that holds a secret, without the ends of lines behind it. Errors: others may read it, too.
Result<std::string> read_secret(const std::string& what, const std::string& path, std::size_t most = 4096);

class JobKey {
 public:
  // From a file that only its owner can read, or root and a group of this process (modes 0440 and 0640); at least 16
  // bytes.
  static Result<JobKey> read(const std::string& path);
  explicit JobKey(std::string key) : key_(std::move(key)) {}

  Mac derive(std::string_view purpose) const;
  // What ranks and daemons of the job prove to each other on data connections.
  transport::Secret data_secret() const;
  bool operator==(const JobKey&) const = default;

 private:
  std::string key_;
};

// What a process has: the key that it proves, perhaps a second one that others may prove to it while a job's key is
// being changed, and perhaps certificates for control connections.
class JobKeys {
 public:
  // `other_path`: empty where there is one key. Errors name the file and the remedy.
  static Result<JobKeys> read(const std::string& path, const std::string& other_path,
                              const CertificateFiles& files = {});
  explicit JobKeys(JobKey own, std::optional<JobKey> other = {});
  // With certificates, as check() has let them pass. Errors: as of use_certificates().
  static Result<JobKeys> with_certificates(JobKeys keys, const CertificateFiles& files);

  transport::Secrets data_secrets() const;
  // By which coordinators that share a store know that they are of one job (proto::Leader): the own key's first.
  std::vector<std::uint64_t> store_marks() const;
  const std::vector<JobKey>& all() const { return *all_; }  // the own one first
  struct ControlTls;
  const ControlTls& control() const { return *control_; }  // for Framed

 private:
  static Result<JobKeys> read_keys(const std::string& path, const std::string& other_path);
  std::shared_ptr<const std::vector<JobKey>> all_;
  std::shared_ptr<const ControlTls> control_;
};

}  // namespace rejoin::daemon
