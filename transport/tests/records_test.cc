// Encrypted records, alone and over a wire that somebody reads.
#include "transport/tcp/records.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace rejoin::transport::tcp {
namespace {

const Mac kCipherKey = mac_of(as_bytes("a key"), {});

Bytes sealed(RecordCipher& cipher, BytesView plain) {
  Bytes record;
  const iovec part{const_cast<std::byte*>(plain.data()), plain.size()};
  cipher.seal({&part, 1}, record);
  return record;
}

std::optional<std::string> opened(RecordCipher& cipher, BytesView record) {
  Bytes plain(RecordCipher::kMostPlain + 1);
  const auto size = cipher.open(record, plain);
  return size ? std::optional(std::string(as_text(BytesView(plain).first(*size)))) : std::nullopt;
}

TEST(RecordCipher, OpensWhatWasSealedInThatOrderAndNothingElse) {
  RecordCipher seals(kCipherKey, true), opens(kCipherKey, false);
  const Bytes first = sealed(seals, as_bytes("first")), second = sealed(seals, as_bytes("second"));
  EXPECT_EQ(first.size(), 5 + RecordCipher::kOverhead);
  EXPECT_EQ(opened(opens, first), "first");
  EXPECT_EQ(opened(opens, second), "second");
  for (const auto& [what, record] :
       {std::pair{"left out", second}, {"cut short", Bytes(first.begin(), first.end() - 1)}, {"nothing", Bytes{}}}) {
    RecordCipher other(kCipherKey, false);
    EXPECT_FALSE(opened(other, record)) << what;
  }
  RecordCipher twice(kCipherKey, false);
  EXPECT_EQ(opened(twice, first), "first");
  EXPECT_FALSE(opened(twice, first)) << "repeated";
  RecordCipher other_key(mac_of(as_bytes("another key"), {}), false);
  EXPECT_FALSE(opened(other_key, first));
}

TEST(RecordCipher, AFlippedBitIsFoundWhereverItIs) {
  for (std::size_t bit = 0; bit < 8 * (20 + RecordCipher::kOverhead); ++bit) {
    RecordCipher seals(kCipherKey, true), opens(kCipherKey, false);
    Bytes record = sealed(seals, Bytes(20));
    record[bit / 8] ^= std::byte(1u << bit % 8);
    EXPECT_FALSE(opened(opens, record)) << bit;
  }
}

TEST(RecordCipher, ChangesItsKeyOnBothSidesAtTheSameRecord) {
  RecordCipher seals(kCipherKey, true, 3), opens(kCipherKey, false, 3), never(kCipherKey, false);
  int read_with_the_first_key = 0;
  for (int i = 0; i < 20; ++i) {
    const std::string text = "record " + std::to_string(i);
    const Bytes record = sealed(seals, as_bytes(text));
    EXPECT_EQ(opened(opens, record), text);
    if (opened(never, record)) ++read_with_the_first_key;
  }
  EXPECT_EQ(read_with_the_first_key, 3);
}

TEST(KeyExchange, BothSidesHaveTheSameAndAWorthlessKeyIsRefused) {
  const KeyExchange a, b, c;
  EXPECT_EQ(*a.agree(b.public_key()), *b.agree(a.public_key()));
  EXPECT_NE(*a.agree(b.public_key()), *a.agree(c.public_key()));
  const auto none = a.agree(Nonce{});  // a point of small order: everybody would know what comes of it
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, ErrorCode::refused);
}

// Sizes at random both ways, in pieces as sockets take and give them.
TEST(Records, CarryAnyNumberOfBytesInTheirOrder) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  const Fd near(ends[0]), far(ends[1]);
  const Secret secret = Secret::of({1, 2});
  const KeyExchange calls, listens;
  const Nonce caller = calls.public_key(), listener = listens.public_key();
  Records out(secret, caller, listener, *calls.agree(listener), true);
  Records in(secret, caller, listener, *listens.agree(caller), false);
  std::mt19937_64 random(3);
  Bytes all(20 * MiB);
  for (auto& byte : all) byte = std::byte(random());
  Bytes got(all.size());
  std::size_t sent = 0, received = 0;
  while (received < all.size()) {
    const std::size_t first = std::min<std::size_t>(random() % 40'000, all.size() - sent),
                      second = std::min<std::size_t>(random() % 600'000, all.size() - sent - first);
    iovec parts[] = {{all.data() + sent, first}, {all.data() + sent + first, second}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (sent < all.size()) {
      const auto taken = out.send(near, message);
      ASSERT_TRUE(taken >= 0 || errno == EAGAIN);
      sent += static_cast<std::size_t>(std::max<ssize_t>(taken, 0));
    } else {
      ASSERT_TRUE(out.flush(near) || errno == EAGAIN);
    }
    const std::size_t wanted = std::min<std::size_t>(1 + random() % 100'000, got.size() - received);
    parts[0] = {got.data() + received, wanted / 3};
    parts[1] = {got.data() + received + wanted / 3, wanted - wanted / 3};
    const auto came = in.receive(far, message);
    ASSERT_TRUE(came > 0 || (came < 0 && errno == EAGAIN)) << came;
    received += static_cast<std::size_t>(std::max<ssize_t>(came, 0));
  }
  EXPECT_TRUE(got == all);
  EXPECT_FALSE(out.holds_unsent());
  EXPECT_FALSE(in.holds_received());
}

}  // namespace
}  // namespace rejoin::transport::tcp
