#include "base/proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <bit>

#include "base/entropy.h"
#include "base/fail.h"

namespace rejoin {

void keep_openssl() { (void)::OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr); }

Nonce make_nonce() {
  std::array<std::uint64_t, sizeof(Nonce) / sizeof(std::uint64_t)> numbers{};
  fill_with_random_numbers(numbers);
  return std::bit_cast<Nonce>(numbers);
}

Mac mac_of(BytesView key, std::initializer_list<BytesView> parts) {
  Bytes message;
  for (const BytesView part : parts) message.insert(message.end(), part.begin(), part.end());
  Mac mac;
  unsigned length = 0;
  REJOIN_CHECK(::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
                      reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                      reinterpret_cast<unsigned char*>(mac.data()), &length) != nullptr &&
               length == mac.size());
  return mac;
}

bool equal_in_constant_time(BytesView a, BytesView b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace rejoin
