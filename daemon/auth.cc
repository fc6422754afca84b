#include "daemon/auth.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/fail.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/control_tls.h"

namespace rejoin::daemon {

namespace {

bool is_our_group(gid_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<std::size_t>(std::max(0, ::getgroups(0, nullptr))));
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  return count > 0 && std::find(groups.begin(), groups.begin() + count, group) != groups.begin() + count;
}

// Kept from others. What root gives to a group of ours alone is, too: Kubernetes mounts secrets so under an fsGroup. So
// is what root shares with its own group: by the access list that systemd hands credentials over with, this process
// reads it.
Result<> check_kept(const std::string& named, const struct stat& file) {
  const unsigned mode = file.st_mode & 07777;
  const std::string is = fmt::format("{} has mode {:04o}", named, mode);
  if ((mode & 07) != 0)
    return fail(ErrorCode::refused,
                "{}: others may use it; chmod 600 it, or, where Kubernetes mounts it, set the secret volume's "
                "defaultMode to 0400, or to 0440 with an fsGroup",
                is);
  if ((mode & 030) != 0) return fail(ErrorCode::refused, "{}: its group may change it; chmod 600 it", is);
  if ((mode & 040) == 0 || (file.st_uid == 0 && (file.st_gid == 0 || is_our_group(file.st_gid)))) return {};
  return fail(ErrorCode::refused,
              "{}, owner {} and group {}: its group may read it, which is right only where the owner is root and the "
              "group root's or one of this process's; chmod 600 it",
              is, file.st_uid, file.st_gid);
}

template <typename Check>
Result<std::string> read_regular(const std::string& named, const std::string& path, std::size_t most, Check check) {
  Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // a pipe would wait for a writer
  if (!file) return fail_errno(named);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return fail_errno(named);
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::invalid_argument, "{} is no regular file", named);
  if (auto right = check(named, status); !right) return tl::unexpected(right.error());
  if (status.st_size > static_cast<off_t>(most))
    return fail(ErrorCode::invalid_argument, "{} has {} bytes, over the limit of {}; it is another file", named,
                status.st_size, most);
  std::string text(most, '\0');
  const ssize_t got = ::read(file.get(), text.data(), text.size());
  if (got < 0) return fail_errno(named);
  text.resize(static_cast<std::size_t>(got));
  return text;
}

}  // namespace

Result<std::string> read_file(const std::string& what, const std::string& path, std::size_t most) {
  return read_regular(what + " " + path, path, most, [](const auto&, const auto&) { return Result<>(); });
}

Result<std::string> read_secret(const std::string& what, const std::string& path, std::size_t most) {
  auto secret = read_regular(what + " " + path, path, most, check_kept);
  if (!secret) return secret;
  while (!secret->empty() && (secret->back() == '\n' || secret->back() == '\r')) secret->pop_back();
  return secret;
}

Result<JobKey> JobKey::read(const std::string& path) {
  auto key = read_secret("job key file", path);
  if (!key) return tl::unexpected(key.error());
  if (key->size() < 16)
    return fail(ErrorCode::invalid_argument, "job key in {} has {} bytes; use at least 16, e.g. 'openssl rand -hex 32'",
                path, key->size());
  return JobKey(std::move(*key));
}

Mac JobKey::derive(std::string_view purpose) const { return mac_of(as_bytes(key_), {as_bytes(purpose)}); }

transport::Secret JobKey::data_secret() const { return {derive("rejoin data connections")}; }

Result<JobKeys> JobKeys::read(const std::string& path, const std::string& other_path, const CertificateFiles& files) {
  auto keys = read_keys(path, other_path);
  if (keys && files.given()) return with_certificates(std::move(*keys), files);
  // Also where a variable or a line of a settings file was to name some, and is empty.
  if (keys) spdlog::info("control connections need the job key alone; there is no --tls-cert");
  return keys;
}

Result<JobKeys> JobKeys::with_certificates(JobKeys keys, const CertificateFiles& files) {
  auto control = ControlTls::make(keys.all_, files);
  if (!control) return tl::unexpected(control.error());
  keys.control_ = std::move(*control);
  return keys;
}

Result<JobKeys> JobKeys::read_keys(const std::string& path, const std::string& other_path) {
  auto own = JobKey::read(path);
  if (!own) return tl::unexpected(own.error());
  if (other_path.empty()) return JobKeys(std::move(*own));
  auto other = JobKey::read(other_path);
  if (!other) return fail(other.error().code, "--other-job-key-file: {}", other.error().message);
  if (*other == *own)
    return fail(
        ErrorCode::invalid_argument,
        "--other-job-key-file {} has the same key as --job-key-file {}: leave it out, or give the job's other key",
        other_path, path);
  return JobKeys(std::move(*own), std::move(*other));
}

JobKeys::JobKeys(JobKey own, std::optional<JobKey> other) {
  std::vector<JobKey> all{std::move(own)};
  if (other) all.push_back(std::move(*other));
  all_ = std::make_shared<const std::vector<JobKey>>(std::move(all));
  control_ = std::make_shared<const ControlTls>(all_);
}

std::vector<std::uint64_t> JobKeys::store_marks() const {
  std::vector<std::uint64_t> marks;
  for (const auto& key : *all_) {
    const Mac mac = key.derive("rejoin store of coordinators");
    std::memcpy(&marks.emplace_back(), mac.data(), sizeof(std::uint64_t));
  }
  return marks;
}

transport::Secrets JobKeys::data_secrets() const {
  transport::Secrets secrets{all_->front().data_secret()};
  if (all_->size() > 1) secrets.other = all_->back().data_secret();
  return secrets;
}

}  // namespace rejoin::daemon
