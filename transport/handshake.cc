#include "transport/handshake.h"

namespace rejoin::transport::handshake {

Mac prove_listener(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener) {
  return mac_of(secret.bytes, {as_bytes("rejoin data connection: listener"), of_caller, of_listener});
}

Mac prove_caller(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, BytesView hello) {
  return mac_of(secret.bytes, {as_bytes("rejoin data connection: caller"), of_caller, of_listener, hello});
}

}  // namespace rejoin::transport::handshake
