#include "daemon/auth.h"

#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/fail.h"
#include "base/fd.h"

namespace rejoin::daemon {

namespace {

bool is_our_group(gid_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<std::size_t>(std::max(0, ::getgroups(0, nullptr))));
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  return count > 0 && std::find(groups.begin(), groups.begin() + count, group) != groups.begin() + count;
}

// Kept from others. What root gives to a group of ours alone is, too: Kubernetes mounts secrets so under an fsGroup.
Result<> check_kept(const std::string& path, const struct stat& file) {
  const unsigned mode = file.st_mode & 07777;
  const std::string is = fmt::format("job key file {} has mode {:04o}", path, mode);
  if ((mode & 07) != 0)
    return fail(ErrorCode::refused,
                "{}: others may use it; chmod 600 it, or, where Kubernetes mounts it, set the secret volume's "
                "defaultMode to 0400, or to 0440 with an fsGroup",
                is);
  if ((mode & 030) != 0) return fail(ErrorCode::refused, "{}: its group may change it; chmod 600 it", is);
  if ((mode & 040) == 0 || (file.st_uid == 0 && is_our_group(file.st_gid))) return {};
  return fail(ErrorCode::refused,
              "{}, owner {} and group {}: its group may read it, which is right only where the owner is root and the "
              "group one of this process's; chmod 600 it",
              is, file.st_uid, file.st_gid);
}

}  // namespace

Result<JobKey> JobKey::read(const std::string& path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));  // a pipe would wait for a writer
  if (!file) return fail_errno(fmt::format("job key file {}", path));
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return fail_errno(path);
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::invalid_argument, "job key file {} is no regular file", path);
  if (auto kept = check_kept(path, status); !kept) return tl::unexpected(kept.error());
  std::string key(4096, '\0');
  const ssize_t got = ::read(file.get(), key.data(), key.size());
  if (got < 0) return fail_errno(path);
  key.resize(static_cast<std::size_t>(got));
  while (!key.empty() && (key.back() == '\n' || key.back() == '\r')) key.pop_back();
  if (key.size() < 16)
    return fail(ErrorCode::invalid_argument, "job key in {} has {} bytes; use at least 16, e.g. 'openssl rand -hex 32'",
                path, key.size());
  return JobKey(std::move(key));
}

Mac JobKey::sign(std::string_view purpose, BytesView first, BytesView second) const {
  return mac_of(as_bytes(key_), {as_bytes(purpose), first, second});
}

transport::Secret JobKey::data_secret() const { return {sign("rejoin data connections", {}, {})}; }

struct Tagger::State {
  EVP_MAC* algorithm = ::EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  EVP_MAC_CTX* keyed = ::EVP_MAC_CTX_new(algorithm);
  ~State() {
    ::EVP_MAC_CTX_free(keyed);
    ::EVP_MAC_free(algorithm);
  }
};

Tagger::Tagger(const Mac& key) : state_(std::make_unique<State>()) {
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {::OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
                                   ::OSSL_PARAM_construct_end()};
  REJOIN_CHECK(
      state_->keyed != nullptr &&
      ::EVP_MAC_init(state_->keyed, reinterpret_cast<const unsigned char*>(key.data()), key.size(), parameters) == 1);
}
Tagger::Tagger(Tagger&&) noexcept = default;
Tagger& Tagger::operator=(Tagger&&) noexcept = default;
Tagger::~Tagger() = default;

Tagger::Tag Tagger::next(BytesView bytes) {
  const std::uint64_t count = count_++;
  Mac mac;
  std::size_t length = 0;
  const auto update = [&](BytesView part) {
    return ::EVP_MAC_update(state_->keyed, reinterpret_cast<const unsigned char*>(part.data()), part.size()) == 1;
  };
  REJOIN_CHECK(::EVP_MAC_init(state_->keyed, nullptr, 0, nullptr) == 1 && update(bytes_of(count)) && update(bytes) &&
               ::EVP_MAC_final(state_->keyed, reinterpret_cast<unsigned char*>(mac.data()), &length, mac.size()) == 1 &&
               length == mac.size());
  Tag tag;
  std::copy_n(mac.begin(), tag.size(), tag.begin());
  return tag;
}

}  // namespace rejoin::daemon
