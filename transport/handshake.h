// How two ends of a connection prove that they know the same secret, without showing it: a challenge and its answer in
// both directions, by HMAC-SHA256.
//
//   1. The caller sends a nonce, and the name of the secret that it is going to prove: of two, while a key is changed.
//   2. The listener sends a nonce of its own, and proves itself by both.
//   3. The caller proves itself by both and by its hello, and sends that along.
//
// So nobody hears a caller's hello who does not know the secret, nobody can change it, no answer can be sent back as a
// proof or be used a second time, and the listener keeps 32 bytes of a caller until that has proven itself.
#pragma once

#include "base/proof.h"
#include "transport/secret.h"

namespace rejoin::transport::handshake {

// Tells secrets apart, and tells nothing else of them: the first bytes of an HMAC-SHA256.
std::uint64_t name_of(const Secret& secret);
// The one that a caller has named; the listener's own where it has no such one, whose proof then fails.
const Secret& named(const Secrets& secrets, std::uint64_t name);

// `encrypted`: what follows is to be; both sides prove that they mean the same.
Mac prove_listener(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, bool encrypted = false);
Mac prove_caller(const Secret& secret, const Nonce& of_caller, const Nonce& of_listener, BytesView hello,
                 bool encrypted = false);
// What is said of a listener whose proof is not as it would be.
inline constexpr const char* kUnproven =
    "it has not proven that it knows this connection's secret; between replicas: that it has this job's key";

}  // namespace rejoin::transport::handshake
