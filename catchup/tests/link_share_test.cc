#include "catchup/link_share.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>

#include "base/types.h"

namespace rejoin::catchup {
namespace {

constexpr std::uint64_t kSlice = 1'048'576;  // bytes

using std::chrono::milliseconds, std::chrono::seconds;

Duration after(double s) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(s)); }

// A source with a joiner that always wants 16 slices more, over a link of a rate and a delay, there and back.
struct Link {
  double bytes_per_second;
  std::function<Duration(Duration)> delay;  // after so long
  std::function<std::uint64_t(int)> slice = [](int) { return kSlice; };
  std::function<bool(Duration)> exchanging = [](Duration) { return false; };

  struct Took {
    std::uint64_t most_under_way = 0;
    double rate = 0, busy = 0;  // bytes/s, and the part of the time in which the link sent
  };
  // Of what happens after `from`.
  Took run(Duration time, Duration from) const {
    LinkShare share;
    struct Sent {
      LinkShare::Begun begun;
      std::uint64_t bytes;
      TimePoint ends;
    };
    std::deque<Sent> sent;
    Took took;
    const TimePoint start = TimePoint{} + std::chrono::hours(1);
    TimePoint link_free = start;
    std::uint64_t moved = 0;
    Duration busy{};
    int number = 0;
    for (TimePoint now = start; now < start + time; now += std::chrono::microseconds(100)) {
      const bool counts = now >= start + from;
      for (; !sent.empty() && sent.front().ends <= now; sent.pop_front()) {
        share.on_end(sent.front().begun, sent.front().bytes, now);
        moved += counts ? sent.front().bytes : 0;
      }
      while (sent.size() < 16 && share.may_begin(exchanging(now - start), now)) {
        const std::uint64_t bytes = slice(number++);
        const Duration transmission = after(static_cast<double>(bytes) / bytes_per_second);
        link_free = std::max(link_free, now) + transmission;
        const TimePoint last = sent.empty() ? TimePoint{} : sent.back().ends;  // in order
        sent.push_back({share.on_begin(bytes, now), bytes, std::max(last, link_free + delay(now - start))});
        busy += counts ? transmission : Duration{};
        if (counts) took.most_under_way = std::max(took.most_under_way, share.under_way());
      }
    }
    took.rate = static_cast<double>(moved) / rejoin::seconds(time - from);
    took.busy = rejoin::seconds(busy) / rejoin::seconds(time - from);
    return took;
  }
};

auto always(Duration delay) {
  return [delay](Duration) { return delay; };
}

TEST(LinkShare, LittleWaitsOnASlowLinkThatIsKeptBusyAllTheSame) {
  const auto took = Link{25e6, always(milliseconds(0))}.run(seconds(60), seconds(5));
  EXPECT_LE(took.most_under_way, 3 * kSlice) << "16 would be 0.7 s of the link";
  EXPECT_GE(took.rate, 0.97 * 25e6);
}

TEST(LinkShare, ALongFastLinkIsFilled) {
  const auto took = Link{200e6, always(milliseconds(60))}.run(seconds(60), seconds(3));
  EXPECT_GE(took.rate, 0.95 * 200e6) << "12 slices are on their way at any time";
}

TEST(LinkShare, AFastLinkIsNotHeldBack) {
  const auto took = Link{10e9, always(std::chrono::microseconds(50))}.run(seconds(2), seconds(1));
  EXPECT_EQ(took.most_under_way, 16 * kSlice);
}

TEST(LinkShare, ALinkWhoseDelayGrowsIsFilledAgain) {
  const auto grows = [](Duration at) { return at < seconds(5) ? Duration{} : Duration(milliseconds(50)); };
  EXPECT_GE((Link{200e6, grows}.run(seconds(60), seconds(20)).rate), 0.95 * 200e6);
  EXPECT_GE((Link{25e6, grows}.run(seconds(60), seconds(20)).rate), 0.95 * 25e6);
}

TEST(LinkShare, SmallSlicesBetweenLargeOnesChangeLittle) {
  const auto small = [](int number) { return number % 5 == 0 ? kSlice : std::uint64_t{4096}; };
  const auto first = [](int number) { return number == 0 ? std::uint64_t{4096} : kSlice; };
  for (const Duration delay : {Duration(milliseconds(0)), Duration(milliseconds(100))}) {
    const auto took = Link{25e6, always(delay), first}.run(seconds(60), seconds(20));
    EXPECT_GE(took.rate, 0.95 * 25e6);
    const std::uint64_t most = (delay == Duration{} ? 3 : 6) * kSlice;
    EXPECT_LE(took.most_under_way, most);
    EXPECT_LE((Link{25e6, always(delay), small}.run(seconds(60), seconds(20)).most_under_way), most);
  }
}

TEST(LinkShare, WhileGradientsAreExchangedASlowLinkIsLeftToThemHalfOfTheTime) {
  Link link{25e6, always(milliseconds(0))};
  link.exchanging = [](Duration) { return true; };
  const auto took = link.run(seconds(20), seconds(1));
  EXPECT_EQ(took.most_under_way, kSlice);
  EXPECT_GE(took.busy, 0.45);
  EXPECT_LE(took.busy, 0.51);
}

TEST(LinkShare, WhileGradientsAreExchangedAFastLinkCarriesASliceInTwentyMilliseconds) {
  Link link{10e9, always(std::chrono::microseconds(50))};
  link.exchanging = [](Duration) { return true; };
  const auto took = link.run(seconds(2), seconds(1));
  EXPECT_EQ(took.most_under_way, kSlice);
  EXPECT_NEAR(took.rate, kSlice / 0.02, 0.05 * kSlice / 0.02);
}

TEST(LinkShare, OfPhasesInTurnLittleIsLeftForTheNext) {
  Link link{25e6, always(milliseconds(0))};
  link.exchanging = [](Duration at) { return at % milliseconds(600) >= milliseconds(300); };
  const auto took = link.run(seconds(60), seconds(1));
  EXPECT_LE(took.most_under_way, 3 * kSlice);
  EXPECT_GE(took.busy, 0.7) << "all of one phase, and half of the other";
}

TEST(LinkShare, AJoinerThatWasStoppedIsNotWaitedForAsLongAgain) {
  LinkShare share;
  TimePoint now = TimePoint{} + std::chrono::hours(1);
  const auto begun = share.on_begin(kSlice, now);
  share.on_end(begun, kSlice, now += seconds(25));
  EXPECT_FALSE(share.may_begin(true, now));
  EXPECT_TRUE(share.may_begin(true, now + seconds(1)));
}

TEST(LinkShare, AClockThatStandsStillHoldsNothingBack) {
  LinkShare share;
  const TimePoint now = TimePoint{} + std::chrono::hours(1);
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(share.may_begin(false, now));
    share.on_end(share.on_begin(kSlice, now), kSlice, now);
  }
  EXPECT_EQ(share.under_way(), 0u);
}

}  // namespace
}  // namespace rejoin::catchup
