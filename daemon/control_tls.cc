#include "daemon/control_tls.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <asio/ssl/error.hpp>

#include "base/fail.h"
#include "base/log.h"

namespace rejoin::daemon {

namespace {

// For ALPN: each name's length, and the name with the control protocol's version.
constexpr std::string_view kByKey = "\x10rejoin control 3", kByCertificates = "\x22rejoin control 3 with certificates";
static_assert(kByKey.size() == std::size_t{0x10} + 1 && kByCertificates.size() == std::size_t{0x22} + 1);
constexpr const char* kSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};
constexpr Duration kTriedAgainAfter = std::chrono::seconds(1);
constexpr std::string_view kExported = "EXPERIMENTAL rejoin control";

const unsigned char* unsigned_of(BytesView bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

// What this connection has, and no other one.
Mac exported_by(SSL* connection) {
  Mac exported{};
  REJOIN_CHECK(::SSL_export_keying_material(connection, reinterpret_cast<unsigned char*>(exported.data()),
                                            exported.size(), kExported.data(), kExported.size(), nullptr, 0, 0) == 1);
  return exported;
}

// Why a handshake by a pre-shared key has failed; nothing where that is no matter of keys.
std::string why_by_key(int reason) {
  constexpr const char* kLacks = "give this one --tls-ca, --tls-cert and --tls-key, too, or leave them out everywhere";
  switch (reason) {
    // The server knows no such key, or heard a proof that is wrong; the client hears of the first by an alert.
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM:
    case SSL_R_MISSING_SIGALGS_EXTENSION:
    case SSL_R_BINDER_DOES_NOT_VERIFY:
    case SSL_R_DIGEST_CHECK_FAILED:
    case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
    case SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_TLSV1_ALERT_UNKNOWN_PSK_IDENTITY:
    // It took none of the keys that it was offered, and has a certificate.
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA: return "its job key differs from ours; give both the same --job-key-file";
    case SSL_R_CALLBACK_FAILED:  // greet()
      return fmt::format("it has a certificate, and this process none; {}", kLacks);
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
      return fmt::format("it asks for a certificate, and this process has none; {}", kLacks);
    default: return {};
  }
}

// The same of one by certificates, but for what the other side's own are: those are examined.
std::string why_by_certificates(int reason, const CertificateFiles& files) {
  const auto not_taken = [&](const char* why) {
    return fmt::format("it does not take our --tls-cert {}: {}", files.cert, why);
  };
  switch (reason) {
    case SSL_R_CALLBACK_FAILED:  // greet()
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return "it has no certificate, and this process asks for one; give it --tls-ca, --tls-cert and --tls-key, too, "
             "or leave them out everywhere";
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      return not_taken("it has expired, or is not valid yet by the clock there; renew it, or set that clock right");
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
      return not_taken("no CA of the --tls-ca there has signed it; give both sides certificates of one CA");
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
      return not_taken("it is not one of that side; sign it with the extendedKeyUsage serverAuth,clientAuth");
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
      return not_taken(
          "its names are others than it was asked for by, or it is worth nothing; the log there says more");
    default: return {};
  }
}

}  // namespace

struct JobKeys::ControlTls::Key {
  explicit Key(const JobKey& key)
      : secret(key.derive("rejoin control: pre-shared key")),
        proves(key.derive("rejoin control: proof inside of TLS")) {
    const Mac of_key = key.derive("rejoin control: the key's name");
    std::copy_n(of_key.begin(), name.size(), name.begin());
    for (const std::byte byte : name) identity += fmt::format("{:02x}", std::to_integer<unsigned>(byte));
  }
  Mac proof_of(const char* role, SSL* connection) const {
    return mac_of(proves, {as_bytes(role), exported_by(connection)});
  }
  // To be owned by OpenSSL. Null: there is no memory.
  SSL_SESSION* session(SSL* of) const {
    SSL_SESSION* session = ::SSL_SESSION_new();
    if (session != nullptr && ::SSL_SESSION_set1_master_key(session, unsigned_of(secret), secret.size()) == 1 &&
        ::SSL_SESSION_set_cipher(session, ::SSL_CIPHER_find(of, kSuiteId)) == 1 &&
        ::SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
      return session;
    ::SSL_SESSION_free(session);
    return nullptr;
  }

  KeyName name{};
  std::string identity;
  Mac secret, proves;

  static int index() {
    static const int index = ::CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_SSL_CTX, 0, nullptr, nullptr, nullptr, nullptr);
    return index;
  }
  static const ControlTls& of(SSL* ssl) {
    return *static_cast<const ControlTls*>(::SSL_CTX_get_ex_data(::SSL_get_SSL_CTX(ssl), index()));
  }
  // The client offers its own key.
  static int offer(SSL* ssl, const EVP_MD*, const unsigned char** identity, std::size_t* length,
                   SSL_SESSION** session) {
    const Key& own = of(ssl).keys_->front();
    *identity = unsigned_of(as_bytes(own.identity));
    *length = own.identity.size();
    *session = own.session(ssl);
    return *session != nullptr ? 1 : 0;
  }
  // The server takes any that it has. Without one the handshake fails, since there are no certificates.
  static int find(SSL* ssl, const unsigned char* identity, std::size_t length, SSL_SESSION** session) {
    const std::string_view named(reinterpret_cast<const char*>(identity), length);
    *session = nullptr;
    for (const auto& key : *of(ssl).keys_)
      if (key.identity == named) return (*session = key.session(ssl)) != nullptr ? 1 : 0;
    return 1;
  }
  // A client of the other kind hears which kind this server is of: OpenSSL would say that no key, or no signature, is
  // common to both.
  static int greet(SSL* ssl, int* alert, void*) {
    const bool by_certificates = of(ssl).files_.given();
    const unsigned char* offered = nullptr;
    std::size_t bytes = 0;
    if (::SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &offered, &bytes) != 1)
      return SSL_CLIENT_HELLO_SUCCESS;
    const std::string_view names(reinterpret_cast<const char*>(offered), bytes);
    const auto has = [&](std::string_view kind) { return names.find(kind) != names.npos; };
    if (has(by_certificates ? kByCertificates : kByKey) || !has(by_certificates ? kByKey : kByCertificates))
      return SSL_CLIENT_HELLO_SUCCESS;
    *alert = by_certificates ? SSL_AD_CERTIFICATE_UNKNOWN : SSL_AD_ACCESS_DENIED;
    return SSL_CLIENT_HELLO_ERROR;
  }
  static int choose(SSL* ssl, const unsigned char** chosen, unsigned char* length, const unsigned char* offered,
                    unsigned int bytes, void*) {
    const std::string_view name = of(ssl).files_.given() ? kByCertificates : kByKey;
    unsigned char* found = nullptr;
    if (::SSL_select_next_proto(&found, length, unsigned_of(as_bytes(name)), static_cast<unsigned>(name.size()),
                                offered, bytes) != OPENSSL_NPN_NEGOTIATED)
      return SSL_TLSEXT_ERR_ALERT_FATAL;
    *chosen = found;
    return SSL_TLSEXT_ERR_OK;
  }
};

JobKeys::ControlTls::ControlTls(std::shared_ptr<const std::vector<JobKey>> keys, CertificateFiles files)
    : keys_(std::make_unique<const std::vector<Key>>(keys->begin(), keys->end())),
      files_(std::move(files)),
      context_(new_context()) {
  if (files_.given()) return;
  ::SSL_CTX_set_psk_use_session_callback(context_->native_handle(), &Key::offer);
  ::SSL_CTX_set_psk_find_session_callback(context_->native_handle(), &Key::find);
}

Result<std::shared_ptr<const JobKeys::ControlTls>> JobKeys::ControlTls::make(
    std::shared_ptr<const std::vector<JobKey>> keys, const CertificateFiles& files) {
  auto tls = std::make_shared<ControlTls>(std::move(keys), files);
  tls->read_.emplace(files);
  auto own = use_certificates(tls->context_->native_handle(), files);
  if (!own) return tl::unexpected(own.error());
  tls->own_ = std::move(*own);
  spdlog::info("control connections need certificates; ours: {}", tls->own_->text);
  return tls;
}

JobKeys::ControlTls::~ControlTls() = default;

std::unique_ptr<asio::ssl::context> JobKeys::ControlTls::new_context() const {
  auto made = std::make_unique<asio::ssl::context>(asio::ssl::context::tlsv13);
  SSL_CTX* context = made->native_handle();
  const std::string_view protocol = files_.given() ? kByCertificates : kByKey;
  ::SSL_CTX_set_alpn_select_cb(context, &Key::choose, nullptr);
  ::SSL_CTX_set_client_hello_cb(context, &Key::greet, nullptr);
  ::SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_clear_options(context, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  REJOIN_CHECK(::SSL_CTX_set_ex_data(context, Key::index(), const_cast<ControlTls*>(this)) == 1 &&
                   ::SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                   ::SSL_CTX_set_ciphersuites(context, kSuite) == 1 &&
                   SSL_CTX_set1_groups_list(context, "X25519") == 1 && ::SSL_CTX_set_num_tickets(context, 0) == 1 &&
                   ::SSL_CTX_set_alpn_protos(context, unsigned_of(as_bytes(protocol)),
                                             static_cast<unsigned>(protocol.size())) == 0,
               "OpenSSL has no {}", kSuite);
  return made;
}

asio::ssl::context& JobKeys::ControlTls::context() const {
  if (!files_.given()) return *context_;
  const FileStamps stamps(files_);
  const TimePoint now = std::chrono::steady_clock::now();
  const bool changed = stamps != *read_;
  if (!changed && !(failed_ && now - failed_->at >= kTriedAgainAfter)) return *context_;
  read_ = stamps;
  auto context = new_context();
  if (auto own = use_certificates(context->native_handle(), files_); own) {
    spdlog::info("the certificates have changed; ours: {}", own->text);
    context_ = std::move(context);  // connections that are there keep the old one
    own_ = std::move(*own);
    failed_.reset();
    ends_soon_ = Seldom(kSoonSaidAgainAfter), has_ended_ = Seldom(kEndSaidAgainAfter);
  } else {
    const std::string& why = own.error().message;
    if (changed || failed_->why != why)
      spdlog::warn("the certificates have changed, and those read before stay in use: {}", why);
    failed_ = Failure{why, now};
  }
  return *context_;
}

void JobKeys::ControlTls::look_after() const {
  if (!files_.given()) return;
  (void)context();
  const auto now = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  if (!own_->ends_soon(now)) return;
  const bool ended = own_->until <= now;
  if (!(ended ? has_ended_ : ends_soon_).may_say(std::chrono::steady_clock::now())) return;
  const std::string found = failed_ ? fmt::format("; what is there now can't be used: {}", failed_->why) : "";
  if (ended)
    spdlog::error(
        "our certificate --tls-cert {} ({}) has ended: connections that are there stay, and new ones are refused by "
        "whoever is at the other end; renew it{}",
        files_.cert, own_->text, found);
  else
    spdlog::warn("our certificate --tls-cert {} ({}) ends soon: renew it; it is read without a restart{}", files_.cert,
                 own_->text, found);
}

// OpenSSL takes a pre-shared key for a session that is resumed; there are no others here.
bool JobKeys::ControlTls::proved_the_key(const SSL* connection) const {
  return !files_.given() && ::SSL_session_reused(connection) == 1;
}

auto JobKeys::ControlTls::prove(SSL* connection) const -> ClientProof {
  const Key& own = keys_->front();
  return {own.name, own.proof_of("client", connection)};
}

std::optional<Mac> JobKeys::ControlTls::answer(SSL* connection, const ClientProof& proof) const {
  for (const auto& key : *keys_)
    if (key.name == proof.key && equal_in_constant_time(proof.mac, key.proof_of("client", connection)))
      return key.proof_of("server", connection);
  return std::nullopt;
}

bool JobKeys::ControlTls::is_answer(SSL* connection, const Mac& proof) const {
  return equal_in_constant_time(proof, keys_->front().proof_of("server", connection));
}

auto JobKeys::ControlTls::why_refused(const asio::error_code& error, const PeerCertificate& peer) const
    -> std::optional<Refusal> {
  if (error.category() != asio::error::get_ssl_category()) return std::nullopt;
  if (peer.why_refused) return Refusal{refusals::Why::certificate, *peer.why_refused};
  const int reason = ERR_GET_REASON(static_cast<unsigned long>(error.value()));
  const std::string why = files_.given() ? why_by_certificates(reason, files_) : why_by_key(reason);
  if (!why.empty()) return Refusal{files_.given() ? refusals::Why::certificate : refusals::Why::key, why};
  // Of a reason without a text, such as an alert of a number that nobody has given out, there is none.
  return Refusal{refusals::Why::protocol,
                 fmt::format("it does not speak this version of the Rejoin control protocol ({})", error.message())};
}

}  // namespace rejoin::daemon
