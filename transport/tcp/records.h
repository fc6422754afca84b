// Encryption of a TCP connection: bytes go in records that are encrypted and authenticated by AES-256-GCM, as in
// TLS 1.3 (RFC 8446, section 5: a header of five bytes that is authenticated too, a nonce made of the record's number).
// The keys of both directions come from the connection's secret, which the handshake has proven, and from an X25519
// exchange whose public keys are that handshake's nonces: so who learns the secret later can't read what was sent
// before.
//
// A key is used for 2^24 records and followed by one that is derived from it, at the same record on both sides: TLS's
// bound for AES-GCM (section 5.5) would end a connection after some 380 GB.
//
// Where both sides want it the kernel makes and opens the records, in both directions, under keys of its own
// (kernel_tls.h). It can't change a key: when it has made as many records as a key may, a record of another kind
// tells the other side that from here on this class encrypts what the kernel is given, which goes on. "Records of the
// kernel's" in docs/design-notes.md.
#pragma once

#include <sys/socket.h>

#include <memory>

#include "base/fd.h"
#include "base/proof.h"
#include "transport/secret.h"
#include "transport/tcp/kernel_tls.h"

namespace rejoin::transport::tcp {

// A key pair that is used for one connection.
class KeyExchange {
 public:
  KeyExchange();
  ~KeyExchange();
  KeyExchange(const KeyExchange&) = delete;
  KeyExchange& operator=(const KeyExchange&) = delete;
  Nonce public_key() const;
  // Returns the secret that both sides now share. Errors: `refused` where the peer's public key is one that must not be
  // used (RFC 7748, section 6.1).
  Result<Mac> agree(const Nonce& theirs) const;

 private:
  struct Key;
  std::unique_ptr<Key> key_;
};

// Encrypts or decrypts the records of one direction, with its keys in their order.
class RecordCipher {
 public:
  static constexpr std::size_t kMostPlain = 16 * KiB;   // plain bytes of a record
  static constexpr std::size_t kOverhead = 5 + 1 + 16;  // header, kind, tag
  static constexpr std::uint64_t kRecordsOfAKey = std::uint64_t{1} << 24;

  RecordCipher(const Mac& key, bool seals, std::uint64_t records_of_a_key = kRecordsOfAKey);
  ~RecordCipher();
  RecordCipher(RecordCipher&&) noexcept;
  // Makes a record of these bytes, at most kMostPlain in all, in `record`, which is larger by kOverhead.
  void seal(std::span<const iovec> plain, std::span<std::byte> record);
  // Decrypts the record into `plain`, which has room for it. Returns the number of plain bytes; nothing where the
  // record is damaged: then `plain` has bytes that nobody has proven.
  std::optional<std::size_t> open(BytesView record, std::span<std::byte> plain);

 private:
  struct State;
  void begin();
  void use(const Mac& key);
  std::unique_ptr<State> state_;
};

// Sends and receives a socket's bytes in records.
class Records {
 public:
  // `is_caller` says which side this is, and `shared` is what KeyExchange::agree() returned. `by_kernel` must be the
  // same on both sides, or their keys differ.
  Records(const Secret& secret, const Nonce& caller, const Nonce& listener, const Mac& shared, bool is_caller,
          bool by_kernel = false, std::uint64_t records_of_a_key = RecordCipher::kRecordsOfAKey);
  // With `by_kernel` it hands the keys to the kernel, for the next byte on of a socket that the kernel's TLS is
  // attached to; otherwise it does nothing.
  Result<> begin(const Fd& socket, kernel_tls::Direction direction);
  static bool available();  // says whether OpenSSL is configured to have what this needs
  // These work as sendmsg() and recvmsg() do, without blocking. Bytes that send() has taken may still be here: then
  // holds_unsent() says so, and flush() sends them. A receive() that returns less than was asked for has found no more
  // whole record. EBADMSG: a record was damaged. Where the kernel opens records, `message` has room for four bytes at
  // least.
  ssize_t send(const Fd& socket, const msghdr& message);
  ssize_t receive(const Fd& socket, const msghdr& message);
  bool flush(const Fd& socket);  // false: an error, in errno; EAGAIN where there is no room
  bool holds_unsent() const { return sent_ < sealed_end_; }
  // Says whether the kernel alone encrypts what goes in that direction. For tests.
  bool by_kernel(kernel_tls::Direction direction) const {
    return (direction == kernel_tls::Direction::out ? kernel_out_ : kernel_in_).has_value();
  }
  bool holds_received() const { return plain_begin_ < plain_end_ || whole_record() > 0; }

 private:
  std::size_t whole_record() const;  // its bytes, if there is one at the front of `in_`
  std::optional<std::size_t> open_next(std::size_t record, std::span<std::byte> plain);
  Records(const Mac& out, const Mac& in, bool by_kernel, std::uint64_t records_of_a_key);
  void make_room();
  const std::uint64_t records_of_a_key_;
  std::optional<kernel_tls::Key> kernel_out_, kernel_in_;
  std::uint64_t kernel_records_ = 0;  // how many the kernel has made, at most
  RecordCipher out_, in_cipher_;
  Bytes sealed_;  // records on their way out: [sent_, sealed_end_)
  std::size_t sent_ = 0, sealed_end_ = 0;
  Bytes in_;  // as received: [in_begin_, in_end_)
  std::size_t in_begin_ = 0, in_end_ = 0;
  Bytes plain_;  // one opened record whose place is no single one: [plain_begin_, plain_end_)
  std::size_t plain_begin_ = 0, plain_end_ = 0;
};

}  // namespace rejoin::transport::tcp
