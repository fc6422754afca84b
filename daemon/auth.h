// Proof of the job key without showing it: both sides send a nonce and answer the other's with an HMAC-SHA256.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/proof.h"
#include "base/result.h"
#include "transport/secret.h"

namespace rejoin::daemon {

class JobKey {
 public:
  // From a file that only its owner can read, or root and a group of this process (modes 0440 and 0640); at least 16
  // bytes.
  static Result<JobKey> read(const std::string& path);
  explicit JobKey(std::string key) : key_(std::move(key)) {}

  Mac sign(std::string_view purpose, BytesView first, BytesView second) const;
  // What ranks and daemons of the job show each other on data connections.
  transport::Secret data_secret() const;

 private:
  std::string key_;
};

// Tags of what goes one way over a connection, in order: of a key that both sides derive from their nonces. Bytes that
// were changed, left out, repeated or put in by anyone have another tag.
class Tagger {
 public:
  using Tag = std::array<std::byte, 16>;
  explicit Tagger(const Mac& key);
  Tagger(Tagger&&) noexcept;
  Tagger& operator=(Tagger&&) noexcept;
  ~Tagger();
  Tag next(BytesView bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::uint64_t count_ = 0;
};

}  // namespace rejoin::daemon
