// Encrypted records, alone and over a wire that somebody reads.
#include "transport/tcp/records.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace rejoin::transport::tcp {
namespace {

const Mac kCipherKey = mac_of(as_bytes("a key"), {});

Bytes sealed(RecordCipher& cipher, BytesView plain) {
  Bytes record(plain.size() + RecordCipher::kOverhead);
  const iovec part{const_cast<std::byte*>(plain.data()), plain.size()};
  cipher.seal({&part, 1}, record);
  return record;
}

std::optional<std::string> opened(RecordCipher& cipher, BytesView record) {
  Bytes plain(RecordCipher::kMostPlain);
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

// Its place has no room for more, and is in the middle of others' memory.
TEST(RecordCipher, ARecordIsOpenedInItsPlaceAndTouchesNothingBehindIt) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, RecordCipher::kMostPlain}) {
    RecordCipher seals(kCipherKey, true), opens(kCipherKey, false);
    const Bytes plain(size, std::byte{5});
    const Bytes record = sealed(seals, plain);
    Bytes memory(size + 16, std::byte{7});
    EXPECT_EQ(opens.open(record, std::span(memory).first(size)), size);
    EXPECT_TRUE(std::equal(plain.begin(), plain.end(), memory.begin()));
    EXPECT_EQ(std::count(memory.begin() + static_cast<long>(size), memory.end(), std::byte{7}), 16);
  }
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

struct Ends {
  Fd near, far;
};

Ends over_tcp() {
  Ends ends{Fd(::socket(AF_INET, SOCK_STREAM, 0)), {}};
  const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), where, length), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), where, &length), 0);
  EXPECT_EQ(::connect(ends.near.get(), where, length), 0);
  ends.far = Fd(::accept(listener.get(), nullptr, nullptr));
  return ends;
}

// Who has called, and who was.
std::pair<std::unique_ptr<Records>, std::unique_ptr<Records>> both_sides(bool by_kernel, std::uint64_t of_a_key) {
  const Secret secret = Secret::of({1, 2});
  const KeyExchange calls, listens;
  const Nonce caller = calls.public_key(), listener = listens.public_key();
  return {std::make_unique<Records>(secret, caller, listener, *calls.agree(listener), true, by_kernel, of_a_key),
          std::make_unique<Records>(secret, caller, listener, *listens.agree(caller), false, by_kernel, of_a_key)};
}

// Sizes at random, in pieces as sockets take and give them.
void carry(std::size_t bytes, Records& out, const Fd& near, Records& in, const Fd& far) {
  std::mt19937_64 random(3);
  Bytes all(bytes);
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
      ASSERT_TRUE(taken >= 0 || errno == EAGAIN) << std::strerror(errno);
      sent += static_cast<std::size_t>(std::max<ssize_t>(taken, 0));
    } else {
      ASSERT_TRUE(out.flush(near) || errno == EAGAIN);
    }
    Bytes spare(8);  // a caller reads ahead, too
    const std::size_t wanted = std::min<std::size_t>(1 + random() % 100'000, got.size() - received);
    iovec places[] = {{got.data() + received, wanted / 3}, {got.data() + received + wanted / 3, wanted - wanted / 3}};
    iovec last[] = {places[0], places[1], {spare.data(), spare.size()}};
    message.msg_iov = wanted < 8 ? last : places;
    message.msg_iovlen = wanted < 8 ? 3 : 2;
    const auto came = in.receive(far, message);
    ASSERT_TRUE(came > 0 || (came < 0 && errno == EAGAIN)) << came << " " << std::strerror(errno);
    const auto count = static_cast<std::size_t>(std::max<ssize_t>(came, 0));
    if (count > wanted) std::copy_n(spare.begin(), count - wanted, got.begin() + static_cast<long>(received + wanted));
    received += count;
  }
  EXPECT_TRUE(got == all);
  EXPECT_FALSE(out.holds_unsent());
  EXPECT_FALSE(in.holds_received());
}

TEST(Records, CarryAnyNumberOfBytesInTheirOrder) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  const Fd near(ends[0]), far(ends[1]);
  const auto [out, in] = both_sides(false, RecordCipher::kRecordsOfAKey);
  carry(20 * MiB, *out, near, *in, far);
}

// Where there is no module these have nothing to try; ./run vm test boots a kernel that has it.
struct KernelRecords : testing::Test {
  void SetUp() override {
    if (const auto& there = kernel_tls::available(); !there) GTEST_SKIP() << there.error().message;
  }
  static void attached(const Fd& socket) {
    const auto done = kernel_tls::attach(socket);
    ASSERT_TRUE(done) << done.error().message;
  }
};
using kernel_tls::Direction;

TEST_F(KernelRecords, AreThoseOfRecordCipherBothWays) {
  const kernel_tls::Key key = [] {
    kernel_tls::Key made;
    const Mac cipher = mac_of(kCipherKey, {as_bytes("cipher")}), iv = mac_of(kCipherKey, {as_bytes("iv")});
    std::copy_n(cipher.begin(), made.cipher.size(), made.cipher.begin());
    std::copy_n(iv.begin(), made.iv.size(), made.iv.begin());
    return made;
  }();
  const Ends sends = over_tcp(), receives = over_tcp();
  attached(sends.near);
  ASSERT_TRUE(kernel_tls::begin(sends.near, Direction::out, key));
  RecordCipher opens(kCipherKey, false), seals(kCipherKey, true);
  for (const std::string text : {"first", "second"}) {
    ASSERT_EQ(::send(sends.near.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    Bytes record(text.size() + RecordCipher::kOverhead);
    ASSERT_EQ(::recv(sends.far.get(), record.data(), record.size(), MSG_WAITALL), static_cast<ssize_t>(record.size()));
    EXPECT_EQ(opened(opens, record), text);
  }
  attached(receives.far);
  ASSERT_TRUE(kernel_tls::begin(receives.far, Direction::in, key));
  Bytes place(100);
  iovec part{place.data(), place.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  bool handed_over = false;
  // When `record` has come: what there is to read.
  const auto read_of = [&](const Bytes& record) {
    EXPECT_EQ(::send(receives.near.get(), record.data(), record.size(), 0), static_cast<ssize_t>(record.size()));
    pollfd look{receives.far.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&look, 1, 10'000), 1);
    return kernel_tls::receive(receives.far, message, handed_over);
  };
  EXPECT_EQ(read_of(sealed(seals, as_bytes("first"))), 5);
  EXPECT_EQ(as_text(BytesView(place).first(5)), "first");
  // An empty one is no end of the connection.
  EXPECT_EQ(read_of(sealed(seals, {})), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(read_of(sealed(seals, as_bytes("third"))), 5);
  Bytes damaged = sealed(seals, as_bytes("fourth"));
  damaged[10] ^= std::byte(1);
  EXPECT_EQ(read_of(damaged), -1);
  EXPECT_EQ(errno, EBADMSG);
  EXPECT_FALSE(handed_over);
}

TEST_F(KernelRecords, WhenItsKeyIsUsedUpThisProcessEncryptsWhatTheKernelIsGiven) {
  constexpr std::uint64_t kRecords = 100;  // some 1.6 MiB
  const Ends ends = over_tcp();
  const auto [out, in] = both_sides(true, kRecords);
  for (const auto& [side, socket] : {std::pair{out.get(), &ends.near}, {in.get(), &ends.far}}) {
    attached(*socket);
    ASSERT_TRUE(side->begin(*socket, Direction::in));
    ASSERT_TRUE(side->begin(*socket, Direction::out));
  }
  carry(512 * KiB, *out, ends.near, *in, ends.far);
  EXPECT_TRUE(out->by_kernel(Direction::out) && in->by_kernel(Direction::in));
  carry(4 * MiB, *out, ends.near, *in, ends.far);
  EXPECT_FALSE(out->by_kernel(Direction::out) || in->by_kernel(Direction::in));
  EXPECT_TRUE(in->by_kernel(Direction::out) && out->by_kernel(Direction::in)) << "the other direction's key is not";
  carry(4 * MiB, *in, ends.far, *out, ends.near);
  carry(1 * MiB, *out, ends.near, *in, ends.far);
}

// As where somebody on the way has told each another thing.
TEST_F(KernelRecords, WhoTakesTheOtherForOneWithoutThemReadsNothing) {
  const Secret secret = Secret::of({1, 2});
  const KeyExchange calls, listens;
  const Nonce caller = calls.public_key(), listener = listens.public_key();
  Records by_kernel(secret, caller, listener, *calls.agree(listener), true, true);
  Records by_process(secret, caller, listener, *listens.agree(caller), false, false);
  const Ends ends = over_tcp();
  attached(ends.near);
  ASSERT_TRUE(by_kernel.begin(ends.near, Direction::out));
  ASSERT_EQ(::send(ends.near.get(), "hello", 5, 0), 5);
  pollfd look{ends.far.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&look, 1, 10'000), 1);
  Bytes place(100);
  iovec part{place.data(), place.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  EXPECT_EQ(by_process.receive(ends.far, message), -1);
  EXPECT_EQ(errno, EBADMSG);
}

}  // namespace
}  // namespace rejoin::transport::tcp
