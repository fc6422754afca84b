#include "daemon/certificates.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <ctime>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "daemon/auth.h"
#include "daemon/flags.h"
#include "daemon/pem.h"

namespace rejoin::daemon {

namespace {

constexpr std::size_t kLargestFile = 1 * MiB;
constexpr long kLongestChain = 64 * KiB;  // that a peer may show

template <typename T, void (*free)(T*)>
struct Freed {
  void operator()(T* it) const { free(it); }
};
using Certificate = std::unique_ptr<X509, Freed<X509, ::X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY, ::EVP_PKEY_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, Freed<GENERAL_NAMES, ::GENERAL_NAMES_free>>;
struct FreeBio {
  void operator()(BIO* bio) const { ::BIO_free(bio); }
};
using Bio = std::unique_ptr<BIO, FreeBio>;

Bio reading(std::string_view text) { return Bio(::BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

std::string written(Bio bio) {
  char* text = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &text);
  return {text, static_cast<std::size_t>(std::max(0L, length))};
}

// As "CN=node0,O=Example": what is not printable is escaped, since a stranger may have chosen it.
std::string subject_of(const X509* certificate) {
  constexpr std::size_t most = 200;
  Bio bio(::BIO_new(::BIO_s_mem()));
  ::X509_NAME_print_ex(bio.get(), ::X509_get_subject_name(certificate), 0, XN_FLAG_RFC2253);
  std::string subject = written(std::move(bio)).substr(0, most);
  return subject.empty() ? "without a subject" : subject;
}

std::string time_of(const ASN1_TIME* time) {
  tm parts{};
  if (::ASN1_TIME_to_tm(time, &parts) != 1) return "?";
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

// Of the names that a certificate is for, the first few.
std::string names_of(const X509* certificate) {
  constexpr int most = 8;
  const Names names(
      static_cast<GENERAL_NAMES*>(::X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  const int count = names ? sk_GENERAL_NAME_num(names.get()) : 0;
  std::string all;
  for (int i = 0; i < std::min(count, most); ++i) {
    Bio bio(::BIO_new(::BIO_s_mem()));
    ::GENERAL_NAME_print(bio.get(), sk_GENERAL_NAME_value(names.get(), i));
    all += (i == 0 ? "" : ", ") + written(std::move(bio)).substr(0, 64);
  }
  for (char& letter : all)
    if (std::iscntrl(static_cast<unsigned char>(letter)) != 0) letter = '?';
  if (count > most) all += fmt::format(" and {} more", count - most);
  return all.empty() ? "no name" : all;
}

bool is_own(SSL* connection, const X509* certificate) {
  const X509* own = ::SSL_get_certificate(connection);
  return own != nullptr && certificate != nullptr && ::X509_cmp(own, certificate) == 0;
}

std::string why_not_taken(X509_STORE_CTX* store, const PeerCertificate& peer, bool server) {
  const int error = ::X509_STORE_CTX_get_error(store);
  const bool own = ::X509_STORE_CTX_get_error_depth(store) == 0;
  const X509 *shown = ::X509_STORE_CTX_get0_cert(store), *certificate = ::X509_STORE_CTX_get_current_cert(store);
  if (certificate == nullptr) certificate = shown;
  const std::string its = fmt::format("its certificate ({})", subject_of(shown));
  const std::string which =
      own ? its : fmt::format("the certificate of the CA ({}) that has signed its own", subject_of(certificate));
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return fmt::format("{} has expired at {}; renew it", which, time_of(::X509_get0_notAfter(certificate)));
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return fmt::format("{} is valid from {} on; set the clocks of both machines right", which,
                         time_of(::X509_get0_notBefore(certificate)));
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return fmt::format(
          "{} is for {}, and it was asked for as {}; --connect to it by one of its names, or give it a certificate "
          "that has this one as a subjectAltName",
          its, names_of(shown), peer.host);
    case X509_V_ERR_INVALID_PURPOSE:
      return fmt::format("{} is not one of a {}; sign it with the extendedKeyUsage {}", which,
                         server ? "client" : "server", server ? "clientAuth" : "serverAuth");
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
    case X509_V_ERR_CERT_UNTRUSTED:
      return fmt::format("{} is not signed by a CA in our --tls-ca {}; give both sides certificates of one CA", its,
                         peer.files->ca);
    default: return fmt::format("{} is worth nothing: {}", which, ::X509_verify_cert_error_string(error));
  }
}

int examined_index() {
  static const int index = ::CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_SSL, 0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

// Called for each certificate of a chain, and for each error of one.
int on_verified(int sound, X509_STORE_CTX* store) {
  if (sound == 1) return 1;
  auto* connection = static_cast<SSL*>(::X509_STORE_CTX_get_ex_data(store, ::SSL_get_ex_data_X509_STORE_CTX_idx()));
  const int error = ::X509_STORE_CTX_get_error(store);
  const bool other_name = error == X509_V_ERR_HOSTNAME_MISMATCH || error == X509_V_ERR_IP_ADDRESS_MISMATCH;
  if (other_name && is_own(connection, ::X509_STORE_CTX_get0_cert(store))) return 1;
  auto* peer = static_cast<PeerCertificate*>(::SSL_get_ex_data(connection, examined_index()));
  if (peer != nullptr && !peer->why_refused)
    peer->why_refused = why_not_taken(store, *peer, ::SSL_is_server(connection) == 1);
  return 0;
}

// A passphrase would be asked for at the terminal.
int no_passphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

tl::unexpected<Error> damaged(const char* flag, const std::string& path, const std::string& where) {
  return fail(ErrorCode::invalid_argument,
              "{} {} is damaged: {}; write it anew, the whole of it under another name, and rename that to this one",
              flag, path, where);
}

tl::unexpected<Error> unreadable(const char* flag, const std::string& path, std::size_t number, const PemBlock& block) {
  const char* why = ::ERR_reason_error_string(::ERR_peek_error());
  ::ERR_clear_error();
  return damaged(flag, path,
                 fmt::format("its block {} (line {}) can't be read{}{}", number, block.line, why == nullptr ? "" : ": ",
                             why == nullptr ? "" : why));
}

Result<std::vector<Certificate>> read_certificates(const char* flag, const std::string& path) {
  const auto text = read_file(flag, path, kLargestFile);
  if (!text) return tl::unexpected(text.error());
  const auto blocks = pem_blocks(*text);
  if (!blocks) return damaged(flag, path, blocks.error().message);
  std::vector<Certificate> all;
  for (std::size_t i = 0; i < blocks->size(); ++i) {
    const auto& block = (*blocks)[i];
    if (block.kind != PEM_STRING_X509 && block.kind != PEM_STRING_X509_OLD && block.kind != PEM_STRING_X509_TRUSTED)
      continue;
    bool asked = false;
    Certificate one(::PEM_read_bio_X509_AUX(reading(block.text).get(), nullptr, &no_passphrase, &asked));
    if (!one) return unreadable(flag, path, i + 1, block);
    all.push_back(std::move(one));
  }
  if (all.empty())
    return fail(ErrorCode::invalid_argument, "{} {} has no certificate in PEM form; convert it with openssl x509", flag,
                path);
  return all;
}

Result<Key> key_in(const char* flag, const std::string& text, const std::string& path) {
  const auto blocks = pem_blocks(text);
  if (!blocks) return damaged(flag, path, blocks.error().message);
  const auto block = std::ranges::find_if(
      *blocks, [](const auto& one) { return one.kind.ends_with("PRIVATE KEY") && one.kind != "OPENSSH PRIVATE KEY"; });
  if (block == blocks->end())
    return fail(ErrorCode::invalid_argument, "{} {} has no private key in PEM form; convert it with openssl pkey", flag,
                path);
  bool asked = false;
  Key key(::PEM_read_bio_PrivateKey(reading(block->text).get(), nullptr, &no_passphrase, &asked));
  if (!key && !asked) return unreadable(flag, path, static_cast<std::size_t>(block - blocks->begin()) + 1, *block);
  ::ERR_clear_error();
  if (key) return key;
  return fail(ErrorCode::invalid_argument,
              "{} {} is protected by a passphrase, which nobody could type; take it off with openssl pkey", flag, path);
}

Result<Key> read_key(const char* flag, const std::string& path) {
  auto text = read_secret(flag, path, kLargestFile);
  if (!text) return tl::unexpected(text.error());
  auto key = key_in(flag, *text, path);
  ::OPENSSL_cleanse(text->data(), text->size());
  return key;
}

Result<> check_valid_now(const X509* certificate, const std::string& path) {
  const auto *from = ::X509_get0_notBefore(certificate), *until = ::X509_get0_notAfter(certificate);
  if (::X509_cmp_current_time(until) < 0)
    return fail(ErrorCode::invalid_argument, "--tls-cert {} ({}) has expired at {}; renew it", path,
                subject_of(certificate), time_of(until));
  if (::X509_cmp_current_time(from) > 0)
    return fail(ErrorCode::invalid_argument, "--tls-cert {} ({}) is valid from {} on; set this machine's clock right",
                path, subject_of(certificate), time_of(from));
  return {};
}

WallTime wall_time_of(const ASN1_TIME* time) {
  tm parts{};
  REJOIN_CHECK(::ASN1_TIME_to_tm(time, &parts) == 1, "a certificate that was verified has no time");
  return WallTime(std::chrono::seconds(::timegm(&parts)));
}

// Others with the same CAs would refuse it: this is said by whom it belongs to, before anybody asks.
Result<OwnCertificate> check_signed(SSL_CTX* context, X509* own, const CertificateFiles& files) {
  STACK_OF(X509)* chain = nullptr;
  (void)::SSL_CTX_get0_chain_certs(context, &chain);
  const std::unique_ptr<X509_STORE_CTX, decltype(&::X509_STORE_CTX_free)> verifying(::X509_STORE_CTX_new(),
                                                                                    &::X509_STORE_CTX_free);
  if (!verifying || ::X509_STORE_CTX_init(verifying.get(), ::SSL_CTX_get_cert_store(context), own, chain) != 1)
    return fail(ErrorCode::exhausted, "OpenSSL has no memory to verify --tls-cert {}", files.cert);
  if (::X509_verify_cert(verifying.get()) == 1) {
    OwnCertificate its{.text = {}, .from = WallTime::min(), .until = WallTime::max()};
    const STACK_OF(X509)* path = ::X509_STORE_CTX_get0_chain(verifying.get());
    for (int i = 0; i < sk_X509_num(path); ++i) {
      const X509* one = sk_X509_value(path, i);
      its.from = std::max(its.from, wall_time_of(::X509_get0_notBefore(one)));
      its.until = std::min(its.until, wall_time_of(::X509_get0_notAfter(one)));
    }
    its.text = fmt::format("{}, valid until {:%Y-%m-%d %H:%M:%S} UTC", subject_of(own), its.until);
    return its;
  }
  const int error = ::X509_STORE_CTX_get_error(verifying.get());
  ::ERR_clear_error();
  return fail(ErrorCode::invalid_argument,
              "--tls-cert {} ({}) is not worth anything to who has --tls-ca {}: {}; give it one that a CA in that file "
              "has signed, with the certificates of those between them",
              files.cert, subject_of(own), files.ca, ::X509_verify_cert_error_string(error));
}

}  // namespace

void bind(CommandLine& line, CertificateFiles& files) {
  line.setting("--tls-ca", files.ca, "REJOIN_TLS_CA",
               "file with the certificates that those of all daemons, relays and coordinators are signed with: control "
               "connections then need certificates of both sides, and the job key")
      .check(file_name());
  line.setting("--tls-cert", files.cert, "REJOIN_TLS_CERT", "file with this process's own certificate")
      .check(file_name());
  line.setting("--tls-key", files.key, "REJOIN_TLS_KEY", "file with the private key of --tls-cert (mode 600)")
      .check(file_name());
}

Result<> check(const CertificateFiles& files) {
  const std::pair<const char*, const std::string*> all[] = {
      {"--tls-ca", &files.ca}, {"--tls-cert", &files.cert}, {"--tls-key", &files.key}};
  std::vector<std::string> given, missing;
  for (const auto& [flag, path] : all) (path->empty() ? missing : given).emplace_back(flag);
  if (given.empty() || missing.empty()) return {};
  return fail(ErrorCode::invalid_argument,
              "{} without {}; give all three of --tls-ca, --tls-cert and --tls-key, which control connections need, or "
              "none",
              fmt::join(given, " and "), fmt::join(missing, " and "));
}

FileStamps::FileStamps(const CertificateFiles& files) {
  const std::string* all[] = {&files.ca, &files.cert, &files.key};
  const auto ns = [](const timespec& time) { return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  for (std::size_t i = 0; i < stamps_.size(); ++i) {
    struct stat now {};
    if (::stat(all[i]->c_str(), &now) == 0) stamps_[i] = {now.st_ino, now.st_size, ns(now.st_mtim), ns(now.st_ctim)};
  }
}

// In seconds: some are valid for longer than nanoseconds can count.
bool OwnCertificate::ends_soon(std::chrono::system_clock::time_point now) const {
  return until - std::chrono::floor<std::chrono::seconds>(now) <
         std::min<std::chrono::seconds>(std::chrono::days(7), (until - from) / 3);
}

Result<> check_certificates(const char* flag, const std::string& path) {
  ::ERR_clear_error();
  return read_certificates(flag, path).map([](const auto&) {});
}

Result<> check_private_key(const char* flag, const std::string& path) {
  ::ERR_clear_error();
  return read_key(flag, path).map([](const auto&) {});
}

Result<OwnCertificate> use_certificates(SSL_CTX* context, const CertificateFiles& files) {
  ::ERR_clear_error();  // what is found there later is of these files
  const auto authorities = read_certificates("--tls-ca", files.ca);
  if (!authorities) return tl::unexpected(authorities.error());
  const auto chain = read_certificates("--tls-cert", files.cert);
  if (!chain) return tl::unexpected(chain.error());
  const auto key = read_key("--tls-key", files.key);
  if (!key) return tl::unexpected(key.error());
  X509* own = chain->front().get();
  if (auto valid = check_valid_now(own, files.cert); !valid) return tl::unexpected(valid.error());
  if (::X509_check_private_key(own, key->get()) != 1) {
    ::ERR_clear_error();
    return fail(ErrorCode::invalid_argument,
                "--tls-key {} does not belong to --tls-cert {} ({}); give the key that this certificate was made for",
                files.key, files.cert, subject_of(own));
  }
  X509_STORE* store = ::SSL_CTX_get_cert_store(context);
  bool taken = true;
  for (const auto& one : *authorities) taken = taken && ::X509_STORE_add_cert(store, one.get()) == 1;
  taken = taken && ::SSL_CTX_use_certificate(context, own) == 1 && ::SSL_CTX_use_PrivateKey(context, key->get()) == 1;
  for (std::size_t i = 1; i < chain->size(); ++i)
    taken = taken && ::SSL_CTX_add1_chain_cert(context, (*chain)[i].get()) == 1;
  if (!taken) {
    const char* why = ::ERR_reason_error_string(::ERR_get_error());
    ::ERR_clear_error();
    return fail(ErrorCode::invalid_argument, "OpenSSL does not take --tls-cert {} with --tls-ca {}: {}", files.cert,
                files.ca, why == nullptr ? "it says no reason" : why);
  }
  ::X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN);  // an intermediate CA may be all that is trusted
  auto is_signed = check_signed(context, own, files);
  if (!is_signed) return is_signed;
  ::SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, &on_verified);
  ::SSL_CTX_set_max_cert_list(context, kLongestChain);
  return is_signed;
}

void examine(SSL* connection, PeerCertificate& peer, bool server) {
  REJOIN_CHECK(::SSL_set_ex_data(connection, examined_index(), &peer) == 1);
  if (server) return;
  X509_VERIFY_PARAM* verified = ::SSL_get0_param(connection);
  ::X509_VERIFY_PARAM_set_hostflags(verified,
                                    X509_CHECK_FLAG_NEVER_CHECK_SUBJECT | X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (::X509_VERIFY_PARAM_set1_ip_asc(verified, peer.host.c_str()) == 1) return;
  ::ERR_clear_error();
  REJOIN_CHECK(!peer.host.empty() && ::X509_VERIFY_PARAM_set1_host(verified, peer.host.data(), peer.host.size()) == 1);
}

}  // namespace rejoin::daemon
