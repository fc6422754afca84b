#include "transport/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/fail.h"

namespace rejoin::transport::handshake {

namespace {

Proof prove(std::string_view who, const Secret& secret, const Nonce& of_caller, const Nonce& of_listener,
            BytesView hello) {
  Bytes message;
  for (const BytesView part : {as_bytes(who), BytesView(of_caller), BytesView(of_listener), hello})
    message.insert(message.end(), part.begin(), part.end());
  Proof proof;
  unsigned length = 0;
  REJOIN_CHECK(::HMAC(::EVP_sha256(), secret.bytes.data(), static_cast<int>(secret.bytes.size()),
                      reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                      reinterpret_cast<unsigned char*>(proof.data()), &length) != nullptr &&
               length == proof.size());
  return proof;
}

}  // namespace

Nonce make_nonce() {
  Nonce nonce;
  REJOIN_CHECK(::RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) == 1,
               "the system gives no random numbers");
  return nonce;
}

Proof prove_listener(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener) {
  return prove("rejoin data connection: listener", secret, of_caller, of_listener, {});
}

Proof prove_caller(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, BytesView hello) {
  return prove("rejoin data connection: caller", secret, of_caller, of_listener, hello);
}

bool equal(const Proof& a, const Proof& b) { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace rejoin::transport::handshake
