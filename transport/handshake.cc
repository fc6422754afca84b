#include "transport/handshake.h"

namespace rejoin::transport::handshake {

std::uint64_t name_of(const Secret& secret) {
  const Mac mac = mac_of(secret.bytes, {as_bytes("rejoin data connection: the secret's name")});
  std::uint64_t name = 0;
  std::memcpy(&name, mac.data(), sizeof name);
  return name;
}

const Secret& named(const Secrets& secrets, std::uint64_t name) {
  return secrets.other && name == name_of(*secrets.other) ? *secrets.other : secrets.own;
}

Mac prove_listener(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, bool encrypted) {
  return mac_of(secret.bytes, {as_bytes(encrypted ? "rejoin encrypted data connection: listener"
                                                  : "rejoin data connection: listener"),
                               of_caller, of_listener});
}

Mac prove_caller(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, BytesView hello,
                 bool encrypted) {
  return mac_of(secret.bytes,
                {as_bytes(encrypted ? "rejoin encrypted data connection: caller" : "rejoin data connection: caller"),
                 of_caller, of_listener, hello});
}

}  // namespace rejoin::transport::handshake
