#include "transport/tcp/records.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/fail.h"

namespace rejoin::transport::tcp {

namespace {

constexpr std::size_t kHeader = 5, kTag = 16, kIv = 12;
constexpr std::size_t kRecordsPerCall = 8;
constexpr std::size_t kReadAhead = 8 * (RecordCipher::kMostPlain + RecordCipher::kOverhead);

const unsigned char* in_of(BytesView bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }
unsigned char* out_of(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

std::array<std::byte, kHeader> header_of(std::size_t sealed) {
  return {kernel_tls::kApplicationData, std::byte{3}, std::byte{3}, static_cast<std::byte>(sealed >> 8),
          static_cast<std::byte>(sealed)};
}

Mac key_of(const Secret& secret, const Nonce& caller, const Nonce& listener, const Mac& shared, const char* direction) {
  return mac_of(secret.bytes, {as_bytes("rejoin data connection: key of what goes to the "), as_bytes(direction),
                               caller, listener, shared});
}

kernel_tls::Key kernel_key_of(const Mac& of_direction) {
  const Mac key = mac_of(of_direction, {as_bytes("the kernel")});
  kernel_tls::Key made;
  const Mac cipher = mac_of(key, {as_bytes("cipher")}), iv = mac_of(key, {as_bytes("iv")});
  std::copy_n(cipher.begin(), made.cipher.size(), made.cipher.begin());
  std::copy_n(iv.begin(), made.iv.size(), made.iv.begin());
  return made;
}

// What this class encrypts with: all, or what the kernel may not any more.
Mac own_key_of(const Mac& key, bool by_kernel) { return by_kernel ? mac_of(key, {as_bytes("after the kernel")}) : key; }

}  // namespace

// ---- KeyExchange

struct KeyExchange::Key {
  EVP_PKEY* pair = ::EVP_PKEY_Q_keygen(nullptr, nullptr, "X25519");
  ~Key() { ::EVP_PKEY_free(pair); }
};

KeyExchange::KeyExchange() : key_(std::make_unique<Key>()) {
  REJOIN_CHECK(key_->pair != nullptr, "OpenSSL has no X25519");
}
KeyExchange::~KeyExchange() = default;

Nonce KeyExchange::public_key() const {
  Nonce key{};
  std::size_t length = key.size();
  REJOIN_CHECK(::EVP_PKEY_get_raw_public_key(key_->pair, out_of(key.data()), &length) == 1 && length == key.size());
  return key;
}

Result<Mac> KeyExchange::agree(const Nonce& theirs) const {
  Mac shared{};
  std::size_t length = shared.size();
  EVP_PKEY* peer = ::EVP_PKEY_new_raw_public_key_ex(nullptr, "X25519", nullptr, in_of(theirs), theirs.size());
  EVP_PKEY_CTX* context = ::EVP_PKEY_CTX_new(key_->pair, nullptr);
  const bool agreed = peer != nullptr && context != nullptr && ::EVP_PKEY_derive_init(context) == 1 &&
                      ::EVP_PKEY_derive_set_peer(context, peer) == 1 &&
                      ::EVP_PKEY_derive(context, out_of(shared.data()), &length) == 1 && length == shared.size();
  ::EVP_PKEY_CTX_free(context);
  ::EVP_PKEY_free(peer);
  if (!agreed) return fail(ErrorCode::refused, "its public key is worth nothing");
  return shared;
}

// ---- RecordCipher

struct RecordCipher::State {
  Mac key{};
  const bool seals;
  const std::uint64_t records_of_a_key;
  std::uint64_t number = 0;  // of the next record under this key
  std::array<std::byte, kIv> iv{};
  EVP_CIPHER_CTX* context = ::EVP_CIPHER_CTX_new();
  State(bool sealing, std::uint64_t records) : seals(sealing), records_of_a_key(records) {}
  ~State() { ::EVP_CIPHER_CTX_free(context); }
};

RecordCipher::RecordCipher(const Mac& key, bool seals, std::uint64_t records_of_a_key)
    : state_(std::make_unique<State>(seals, records_of_a_key)) {
  use(key);
}
RecordCipher::~RecordCipher() = default;
RecordCipher::RecordCipher(RecordCipher&&) noexcept = default;

void RecordCipher::use(const Mac& key) {
  state_->key = key;
  state_->number = 0;
  const Mac of_cipher = mac_of(key, {as_bytes("cipher")}), of_iv = mac_of(key, {as_bytes("iv")});
  std::copy_n(of_iv.begin(), kIv, state_->iv.begin());
  REJOIN_CHECK(::EVP_CipherInit_ex(state_->context, ::EVP_aes_256_gcm(), nullptr, in_of(of_cipher), nullptr,
                                   state_->seals ? 1 : 0) == 1,
               "OpenSSL has no AES-256-GCM");
}

// The next record, under its number.
void RecordCipher::begin() {
  if (state_->number == state_->records_of_a_key) use(mac_of(state_->key, {as_bytes("next")}));
  std::array<std::byte, kIv> nonce = state_->iv;
  for (std::size_t i = 0; i < sizeof state_->number; ++i)
    nonce[kIv - 1 - i] ^= static_cast<std::byte>(state_->number >> (8 * i));
  ++state_->number;
  REJOIN_CHECK(::EVP_CipherInit_ex(state_->context, nullptr, nullptr, nullptr, in_of(nonce), -1) == 1);
}

void RecordCipher::seal(std::span<const iovec> plain, std::span<std::byte> record) {
  std::byte* to = record.data();
  begin();
  const auto header = header_of(record.size() - kHeader);
  int length = 0;
  bool done = ::EVP_CipherUpdate(state_->context, nullptr, &length, in_of(header), kHeader) == 1;
  std::copy(header.begin(), header.end(), to);
  to += kHeader;
  const auto append = [&](const void* bytes, std::size_t count) {
    done = done && ::EVP_CipherUpdate(state_->context, out_of(to), &length, static_cast<const unsigned char*>(bytes),
                                      static_cast<int>(count)) == 1;
    to += count;
  };
  for (const auto& part : plain)
    if (part.iov_len > 0) append(part.iov_base, part.iov_len);
  append(&kernel_tls::kApplicationData, 1);
  REJOIN_CHECK(done && ::EVP_CipherFinal_ex(state_->context, out_of(to), &length) == 1 &&
               ::EVP_CIPHER_CTX_ctrl(state_->context, EVP_CTRL_AEAD_GET_TAG, kTag, to) == 1);
}

std::optional<std::size_t> RecordCipher::open(BytesView record, std::span<std::byte> plain) {
  if (record.size() < kOverhead) return std::nullopt;
  const std::size_t size = record.size() - kOverhead;
  const auto header = header_of(size + 1 + kTag);
  if (size > std::min(plain.size(), kMostPlain) || !std::equal(header.begin(), header.end(), record.begin()))
    return std::nullopt;
  begin();
  int length = 0;
  std::byte kind{};
  const auto decrypt = [&](std::byte* to, BytesView from) {
    return ::EVP_CipherUpdate(state_->context, to == nullptr ? nullptr : out_of(to), &length, in_of(from),
                              static_cast<int>(from.size())) == 1;
  };
  std::array<std::byte, kTag> tag;
  std::copy(record.end() - kTag, record.end(), tag.begin());
  const bool sound = decrypt(nullptr, header) && (size == 0 || decrypt(plain.data(), record.subspan(kHeader, size))) &&
                     decrypt(&kind, record.subspan(kHeader + size, 1)) &&
                     ::EVP_CIPHER_CTX_ctrl(state_->context, EVP_CTRL_AEAD_SET_TAG, kTag, tag.data()) == 1 &&
                     ::EVP_CipherFinal_ex(state_->context, out_of(&kind), &length) == 1;
  if (!sound || kind != kernel_tls::kApplicationData) return std::nullopt;
  return size;
}

// ---- Records

Records::Records(const Secret& secret, const Nonce& caller, const Nonce& listener, const Mac& shared, bool is_caller,
                 bool by_kernel, std::uint64_t records_of_a_key)
    : Records(key_of(secret, caller, listener, shared, is_caller ? "listener" : "caller"),
              key_of(secret, caller, listener, shared, is_caller ? "caller" : "listener"), by_kernel,
              records_of_a_key) {}

Records::Records(const Mac& out, const Mac& in, bool by_kernel, std::uint64_t records_of_a_key)
    : records_of_a_key_(records_of_a_key),
      out_(own_key_of(out, by_kernel), true, records_of_a_key),
      in_cipher_(own_key_of(in, by_kernel), false, records_of_a_key) {
  if (!by_kernel) {
    make_room();
  } else {
    kernel_out_ = kernel_key_of(out);
    kernel_in_ = kernel_key_of(in);
  }
}

void Records::make_room() {
  in_.resize(kReadAhead);
  plain_.resize(RecordCipher::kMostPlain);
}

Result<> Records::begin(const Fd& socket, kernel_tls::Direction direction) {
  const auto& key = direction == kernel_tls::Direction::out ? kernel_out_ : kernel_in_;
  return key ? kernel_tls::begin(socket, direction, *key) : Result<>{};
}

bool Records::available() {
  EVP_PKEY* pair = ::EVP_PKEY_Q_keygen(nullptr, nullptr, "X25519");
  EVP_CIPHER_CTX* context = ::EVP_CIPHER_CTX_new();
  const Mac key{};
  const bool there = pair != nullptr && context != nullptr &&
                     ::EVP_CipherInit_ex(context, ::EVP_aes_256_gcm(), nullptr, in_of(key), nullptr, 1) == 1;
  ::EVP_CIPHER_CTX_free(context);
  ::EVP_PKEY_free(pair);
  return there;
}

bool Records::flush(const Fd& socket) {
  while (holds_unsent()) {
    const ssize_t sent = ::send(socket.get(), sealed_.data() + sent_, sealed_end_ - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    sent_ += static_cast<std::size_t>(sent);
  }
  sent_ = sealed_end_ = 0;
  return true;
}

ssize_t Records::send(const Fd& socket, const msghdr& message) {
  if (kernel_out_ && kernel_records_ < records_of_a_key_) {
    const ssize_t sent = ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) kernel_records_ += static_cast<std::size_t>(sent) / RecordCipher::kMostPlain + 1;
    return sent;
  }
  if (kernel_out_ && !kernel_tls::send_handover(socket)) return -1;
  kernel_out_.reset();
  if (!flush(socket)) return -1;
  std::size_t taken = 0, part = 0, skip = 0;
  for (std::size_t record = 0; record < kRecordsPerCall && part < message.msg_iovlen; ++record) {
    std::array<iovec, 64> parts;
    std::size_t used = 0, size = 0;
    while (part < message.msg_iovlen && used < parts.size() && size < RecordCipher::kMostPlain) {
      const iovec& from = message.msg_iov[part];
      const std::size_t step = std::min(from.iov_len - skip, RecordCipher::kMostPlain - size);
      parts[used++] = {static_cast<std::byte*>(from.iov_base) + skip, step};
      size += step;
      skip += step;
      if (skip == from.iov_len) ++part, skip = 0;
    }
    const std::size_t begin = std::exchange(sealed_end_, sealed_end_ + size + RecordCipher::kOverhead);
    if (sealed_.size() < sealed_end_) sealed_.resize(sealed_end_);  // and never less: that would write zeros each time
    out_.seal(std::span(parts).first(used), std::span(sealed_).subspan(begin, sealed_end_ - begin));
    taken += size;
  }
  if (!flush(socket) && errno != EAGAIN && errno != EWOULDBLOCK) return -1;
  return static_cast<ssize_t>(taken);
}

std::size_t Records::whole_record() const {
  const std::size_t there = in_end_ - in_begin_;
  if (there < kHeader) return 0;
  const std::byte* header = in_.data() + in_begin_;
  const std::size_t size =
      kHeader + (std::to_integer<std::size_t>(header[3]) << 8 | std::to_integer<std::size_t>(header[4]));
  return size <= there || size > RecordCipher::kMostPlain + RecordCipher::kOverhead ? size : 0;
}

std::optional<std::size_t> Records::open_next(std::size_t record, std::span<std::byte> plain) {
  if (record > in_end_ - in_begin_) return std::nullopt;  // longer than a record may be
  const auto opened = in_cipher_.open(BytesView(in_).subspan(in_begin_, record), plain);
  in_begin_ += record;
  return opened;
}

ssize_t Records::receive(const Fd& socket, const msghdr& message) {
  if (kernel_in_) {
    bool handed_over = false;
    const ssize_t got = kernel_tls::receive(socket, message, handed_over);
    if (!handed_over) return got;
    kernel_in_.reset();
    make_room();
  }
  std::size_t placed = 0, part = 0, skip = 0;
  for (;;) {
    while (plain_begin_ < plain_end_ && part < message.msg_iovlen) {
      const iovec& to = message.msg_iov[part];
      const std::size_t step = std::min(to.iov_len - skip, plain_end_ - plain_begin_);
      if (step > 0) std::memcpy(static_cast<std::byte*>(to.iov_base) + skip, plain_.data() + plain_begin_, step);
      plain_begin_ += step;
      placed += step;
      skip += step;
      if (skip == to.iov_len) ++part, skip = 0;
    }
    if (part == message.msg_iovlen) return static_cast<ssize_t>(placed);
    if (const std::size_t record = whole_record(); record > 0) {
      // Straight to its place, where that has room for all of it.
      const std::span<std::byte> place(static_cast<std::byte*>(message.msg_iov[part].iov_base) + skip,
                                       message.msg_iov[part].iov_len - skip);
      const bool fits = record <= place.size() + RecordCipher::kOverhead;
      const auto opened = open_next(record, fits ? place : std::span<std::byte>(plain_));
      if (!opened) {
        errno = EBADMSG;
        return -1;
      }
      if (fits) {
        placed += *opened;
        skip += *opened;
        if (skip == message.msg_iov[part].iov_len) ++part, skip = 0;
      } else {
        plain_begin_ = 0;
        plain_end_ = *opened;
      }
      continue;
    }
    std::memmove(in_.data(), in_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_begin_ = 0;
    const ssize_t got = ::recv(socket.get(), in_.data() + in_end_, in_.size() - in_end_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return placed > 0 ? static_cast<ssize_t>(placed) : got;
    in_end_ += static_cast<std::size_t>(got);
  }
}

}  // namespace rejoin::transport::tcp
