#include "catchup/link_share.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/types.h"

namespace rejoin::catchup {
namespace {

constexpr std::uint64_t kSlice = 1'048'576;  // bytes

Duration after(double s) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s)); }

// A source with a joiner that always wants 16 slices more, over a link of this rate, each way of which takes `delay`.
struct Shared {
  struct Took {
    std::uint64_t most_under_way = 0;
    double rate = 0, busy = 0;  // bytes/s, and the part of the time in which the link sent
  };
  double bytes_per_second;
  Duration delay;

  // Of the second half of this time, so that estimates have settled.
  Took run(bool exchanging, Duration time) const {
    LinkShare share;
    struct Sent {
      LinkShare::Begun begun;
      TimePoint arrives;
    };
    std::deque<Sent> sent;
    Took took;
    TimePoint now = TimePoint{} + after(1), link_free = now;
    const TimePoint half = now + time / 2, end = now + time;
    std::uint64_t moved = 0;
    Duration busy{};
    for (; now < end; now += std::chrono::microseconds(100)) {
      for (; !sent.empty() && sent.front().arrives + delay <= now; sent.pop_front()) {
        share.on_end(sent.front().begun, kSlice, now);
        moved += now >= half ? kSlice : 0;
      }
      while (sent.size() < 16 && share.may_begin(exchanging, now)) {
        const Duration transmission = after(kSlice / bytes_per_second);
        link_free = std::max(link_free, now) + transmission;
        sent.push_back({share.on_begin(kSlice, now), link_free + delay});
        busy += now >= half ? transmission : Duration{};
        if (now >= half) took.most_under_way = std::max(took.most_under_way, share.under_way());
      }
    }
    took.rate = static_cast<double>(moved) / seconds(time / 2);
    took.busy = seconds(busy) / seconds(time / 2);
    return took;
  }
};

TEST(LinkShare, LittleWaitsOnASlowLinkThatIsKeptBusyAllTheSame) {
  const auto took = Shared{25e6, std::chrono::microseconds(100)}.run(false, std::chrono::seconds(20));
  EXPECT_LE(took.most_under_way, 3 * kSlice) << "16 would be 0.7 s of the link";
  EXPECT_GE(took.rate, 0.97 * 25e6);
}

TEST(LinkShare, ALongFastLinkIsFilled) {
  const auto took = Shared{200e6, std::chrono::milliseconds(30)}.run(false, std::chrono::seconds(20));
  EXPECT_GE(took.rate, 0.95 * 200e6) << "12 slices are on their way at any time";
  EXPECT_LE(took.most_under_way, 18 * kSlice);
}

TEST(LinkShare, AFastLinkIsNotHeldBack) {
  const auto took = Shared{10e9, std::chrono::microseconds(50)}.run(false, std::chrono::seconds(2));
  EXPECT_EQ(took.most_under_way, 16 * kSlice);
}

TEST(LinkShare, WhileGradientsAreExchangedASlowLinkIsLeftToThemHalfOfTheTime) {
  const auto took = Shared{25e6, std::chrono::microseconds(100)}.run(true, std::chrono::seconds(20));
  EXPECT_EQ(took.most_under_way, kSlice);
  EXPECT_GE(took.busy, 0.45);
  EXPECT_LE(took.busy, 0.5);
}

TEST(LinkShare, WhileGradientsAreExchangedAFastLinkCarriesASliceInTwentyMilliseconds) {
  const auto took = Shared{10e9, std::chrono::microseconds(50)}.run(true, std::chrono::seconds(2));
  EXPECT_EQ(took.most_under_way, kSlice);
  EXPECT_NEAR(took.rate, kSlice / 0.02, 0.05 * kSlice / 0.02);
}

}  // namespace
}  // namespace rejoin::catchup
