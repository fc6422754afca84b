#include "daemon/control_tls.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <asio/ssl/error.hpp>

#include "base/fail.h"

namespace rejoin::daemon {

namespace {

constexpr unsigned char kProtocol[] =
    "\x10rejoin control 3";  // for ALPN: its length, and the control protocol's version
constexpr std::size_t kProtocolBytes = sizeof kProtocol - 1;
constexpr const char* kSuite = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};

const unsigned char* unsigned_of(BytesView bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

}  // namespace

struct JobKeys::ControlTls::PresharedKey {
  explicit PresharedKey(const JobKey& key) : secret(key.derive("rejoin control: pre-shared key")) {
    const Mac name = key.derive("rejoin control: the key's name");
    for (std::size_t i = 0; i < 8; ++i) identity += fmt::format("{:02x}", std::to_integer<unsigned>(name[i]));
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

  std::string identity;
  Mac secret;

  static int index() {
    static const int index = ::CRYPTO_get_ex_new_index(CRYPTO_EX_INDEX_SSL_CTX, 0, nullptr, nullptr, nullptr, nullptr);
    return index;
  }
  static const std::vector<PresharedKey>& of(SSL* ssl) {
    return *static_cast<const std::vector<PresharedKey>*>(::SSL_CTX_get_ex_data(::SSL_get_SSL_CTX(ssl), index()));
  }
  // The client offers its own key.
  static int offer(SSL* ssl, const EVP_MD*, const unsigned char** identity, std::size_t* length,
                   SSL_SESSION** session) {
    const PresharedKey& own = of(ssl).front();
    *identity = unsigned_of(as_bytes(own.identity));
    *length = own.identity.size();
    *session = own.session(ssl);
    return *session != nullptr ? 1 : 0;
  }
  // The server takes any that it has. Without one the handshake fails, since there are no certificates.
  static int find(SSL* ssl, const unsigned char* identity, std::size_t length, SSL_SESSION** session) {
    const std::string_view named(reinterpret_cast<const char*>(identity), length);
    *session = nullptr;
    for (const auto& key : of(ssl))
      if (key.identity == named) return (*session = key.session(ssl)) != nullptr ? 1 : 0;
    return 1;
  }
  static int choose(SSL*, const unsigned char** chosen, unsigned char* length, const unsigned char* offered,
                    unsigned int bytes, void*) {
    unsigned char* found = nullptr;
    if (::SSL_select_next_proto(&found, length, kProtocol, kProtocolBytes, offered, bytes) != OPENSSL_NPN_NEGOTIATED)
      return SSL_TLSEXT_ERR_ALERT_FATAL;
    *chosen = found;
    return SSL_TLSEXT_ERR_OK;
  }
};

JobKeys::ControlTls::ControlTls(std::shared_ptr<const std::vector<JobKey>> keys)
    : context_(asio::ssl::context::tlsv13),
      keys_(std::make_unique<const std::vector<PresharedKey>>(keys->begin(), keys->end())) {
  SSL_CTX* context = context_.native_handle();
  REJOIN_CHECK(
      ::SSL_CTX_set_ex_data(context, PresharedKey::index(), const_cast<std::vector<PresharedKey>*>(keys_.get())) == 1);
  ::SSL_CTX_set_psk_use_session_callback(context, &PresharedKey::offer);
  ::SSL_CTX_set_psk_find_session_callback(context, &PresharedKey::find);
  ::SSL_CTX_set_alpn_select_cb(context, &PresharedKey::choose, nullptr);
  ::SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  ::SSL_CTX_clear_options(context, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
  ::SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
  REJOIN_CHECK(::SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
                   ::SSL_CTX_set_ciphersuites(context, kSuite) == 1 &&
                   SSL_CTX_set1_groups_list(context, "X25519") == 1 && ::SSL_CTX_set_num_tickets(context, 0) == 1 &&
                   ::SSL_CTX_set_alpn_protos(context, kProtocol, kProtocolBytes) == 0,
               "OpenSSL has no {}", kSuite);
}

JobKeys::ControlTls::~ControlTls() = default;

// OpenSSL takes a pre-shared key for a session that is resumed; there are no others here.
bool proved_the_key(const SSL* connection) { return ::SSL_session_reused(connection) == 1; }

std::optional<std::string> why_refused(const asio::error_code& error) {
  if (error.category() != asio::error::get_ssl_category()) return std::nullopt;
  switch (ERR_GET_REASON(static_cast<unsigned long>(error.value()))) {
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
    default:
      // Of a reason without a text, such as an alert of a number that nobody has given out, there is none.
      return fmt::format("it does not speak this version of the Rejoin control protocol ({})", error.message());
  }
}

}  // namespace rejoin::daemon
