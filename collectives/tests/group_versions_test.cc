// Members of releases beside each other.
#include <gmock/gmock.h>

#include <array>

#include "collectives/tests/members.h"
#include "collectives/wire.h"

namespace rejoin::collectives {
namespace {

using namespace std::chrono_literals;
using testing::AllOf, testing::HasSubstr;

// What one says to the other is changed on its way to what a later version would say, which may be longer.
TEST(GroupVersions, MembersThatHaveNoVersionInCommonSayOnBothSidesWhichTheySpeak) {
  for (const bool longer : {false, true}) {
    Members members(2);
    auto between = members.fabric.make_engine();
    const auto address = members.all[1].handle.address;
    members.all[1].handle.address = *between->listen({"sim"});
    const auto works = members.begin_reconfigure(1, {0, 1});
    std::optional<transport::EndpointId> near, far;
    const auto relay = [&](const transport::Event& event) {
      if (event.kind == transport::EventKind::accepted) {
        near = event.endpoint;
        Bytes hello(event.message.begin(), event.message.end());
        hello[32] = std::byte{kNewest + 1};  // behind the secret, number and digest of the configuration
        hello[40] = std::byte{kNewest + 2};
        hello.resize(longer ? hello.size() + 24 : kFirstHelloBytes);
        far = *between->connect({address.text, members.all[1].handle.address.secret}, hello);
      } else if (event.kind == transport::EventKind::message && event.endpoint == far) {
        ASSERT_TRUE(between->send(*near, event.message));
      }
    };
    for (int i = 0; i < 10'000 && !(works[0]->result && works[1]->result); ++i) {
      for (const auto& event : between->poll()) relay(event);
      members.poll();
      if (!members.fabric.step()) members.clock.advance(100us);
    }
    for (const auto& work : works) {
      ASSERT_TRUE(work->result);
      ASSERT_FALSE(*work->result);
      EXPECT_EQ(work->result->error().code, ErrorCode::invalid_argument);
      EXPECT_THAT(work->result->error().message,
                  AllOf(HasSubstr(longer ? "rank 0 (sim:0) speaks versions 3 to 4" : "rank 0 (sim:0) speaks version 3"),
                        HasSubstr("rank 1"), HasSubstr("versions 1 to 2")));
    }
    EXPECT_LT(members.clock.now().time_since_epoch(), 1h + 1s) << "nobody waits for the deadline";
  }
}

// A member of the release that speaks version 1 alone, as it says and hears each byte.
class OfBefore {
 public:
  OfBefore(Members& members, std::uint32_t rank)
      : members_(members), rank_(rank), engine_(members.fabric.make_engine()) {
    auto& member = members.all[rank];
    member.stopped = true;
    member.handle.address = *engine_->listen({"sim"});
  }

  // To the members of higher ranks, of the same configuration as another member's hello.
  void call(BytesView hello) {
    for (auto rank = rank_ + 1; rank < members_.all.size(); ++rank) {
      const auto& handle = members_.all[rank].handle;
      Bytes own(hello.begin(), hello.end());
      std::memcpy(own.data(), &handle.secret, sizeof handle.secret);
      std::memcpy(own.data() + 36, &rank_, sizeof rank_);
      others_[rank] = *engine_->connect({handle.address.text, transport::Secret::of(handle.secret)}, own);
    }
  }
  void poll() {
    for (const auto& event : engine_->poll()) {
      if (event.kind == transport::EventKind::accepted) {
        std::uint32_t version = 0, rank = 0;
        ASSERT_GE(event.message.size(), 40u);
        std::memcpy(&version, event.message.data() + 32, sizeof version);
        std::memcpy(&rank, event.message.data() + 36, sizeof rank);
        if (event.message.size() > 40 || version != 1) {
          ++refused;
          engine_->close(event.endpoint);
          continue;
        }
        others_[rank] = event.endpoint;
        ASSERT_TRUE(engine_->send(event.endpoint, bytes_of(std::uint8_t{0})));
        call(event.message);
      } else if (event.kind == transport::EventKind::message) {
        heard.emplace_back(rank_at(event.endpoint), Bytes(event.message.begin(), event.message.end()));
      } else if (event.kind == transport::EventKind::closed) engine_->close(event.endpoint);
    }
  }
  void ready_for(std::uint32_t rank, std::uint64_t bytes) {
    Bytes said{std::byte{1}};
    // The first collective, its own number of the transfer, and no memory.
    put(said, std::array<std::uint64_t, 6>{0, 77, bytes});
    put(said, Signature{.kind = Collective::all_to_all});
    put(said, std::uint64_t{0});  // no tag; the first transfer
    ASSERT_TRUE(engine_->send(others_.at(rank), said));
  }
  // To the rank's `ready`, which it has heard.
  void send_payload(std::uint32_t rank, BytesView bytes) {
    const auto ready = std::ranges::find(heard, std::pair(rank, std::byte{1}),
                                         [](const auto& one) { return std::pair(one.first, one.second.front()); });
    ASSERT_NE(ready, heard.end());
    Bytes said{std::byte{2}};
    said.insert(said.end(), ready->second.begin() + 9, ready->second.begin() + 17);
    said.insert(said.end(), bytes.begin(), bytes.end());
    ASSERT_TRUE(engine_->send(others_.at(rank), said));
  }
  // In what it has heard, from whom, each kind of message.
  std::vector<std::pair<std::uint32_t, int>> kinds() const {
    std::vector<std::pair<std::uint32_t, int>> all;
    for (const auto& [rank, message] : heard) all.emplace_back(rank, static_cast<int>(message.front()));
    std::ranges::sort(all);
    return all;
  }

  std::vector<std::pair<std::uint32_t, Bytes>> heard;
  int refused = 0;

 private:
  std::uint32_t rank_at(transport::EndpointId endpoint) const {
    return std::ranges::find(others_, endpoint, [](const auto& one) { return one.second; })->first;
  }
  Members& members_;
  const std::uint32_t rank_;
  std::unique_ptr<transport::Engine> engine_;
  std::map<std::uint32_t, transport::EndpointId> others_;
};

// Rank 1 is of the release before: rank 0 calls it, and it calls rank 2. It neither says nor hears anything of
// transfers of 0 bytes, and the other two do among themselves.
TEST(GroupVersions, AMemberOfTheReleaseBeforeIsSpokenWithAsItSpeaks) {
  Members members(3);
  OfBefore before(members, 1);
  const auto configured = members.begin_reconfigure(1, {0, 1, 2});
  const auto run_until = [&](const std::function<bool()>& over) {
    for (int i = 0; i < 10'000 && !over(); ++i) {
      before.poll(), members.poll();
      if (!members.fabric.step()) members.clock.advance(100us);
    }
    return over();
  };
  ASSERT_TRUE(run_until([&] { return configured[0]->result && configured[2]->result; }));
  for (const auto rank : {0, 2}) ASSERT_TRUE(*configured[rank]->result) << configured[rank]->result->error().message;
  EXPECT_EQ(before.refused, 1);

  // 40 bytes from 1 to 0 and from 2 to 1, and nothing else.
  Floats got(10), sent = numbers(2, 10);
  Call first{.kind = Collective::all_to_all, .inputs = {{}, {}, {}}, .outputs = {{}, bytes_in(got), {}}};
  Call last{.kind = Collective::all_to_all, .inputs = {{}, bytes_in(sent), {}}, .outputs = {{}, {}, {}}};
  const std::vector works{members.submit(0, first), members.submit(2, last)};
  ASSERT_TRUE(run_until([&] { return before.kinds().size() == 2; })) << "rank 2's welcome, and `ready` of rank 0";
  before.ready_for(2, 40);
  Floats from_before = numbers(1, 10);
  before.send_payload(0, bytes_in(from_before));
  ASSERT_TRUE(run_until([&] { return works[0]->result && works[1]->result && before.heard.size() == 3; }));
  for (const auto& work : works) ASSERT_TRUE(*work->result) << work->result->error().message;
  EXPECT_EQ(got, from_before);
  EXPECT_EQ(before.kinds(), (std::vector<std::pair<std::uint32_t, int>>{{0, 1}, {2, 0}, {2, 2}}));
  EXPECT_TRUE(std::ranges::equal(std::span(before.heard.back().second).subspan(9), bytes_in(sent)));

  // Between the other two one expects nothing, and the other sends.
  last.inputs = {bytes_in(sent), {}, {}}, first.outputs = {{}, {}, {}};
  const auto begun = members.clock.now();
  const std::vector failing{members.submit(0, first), members.submit(2, last)};
  ASSERT_TRUE(run_until([&] { return failing[0]->result && failing[1]->result; }));
  EXPECT_LT(members.clock.now() - begun, 1s);
  for (const auto& work : failing) EXPECT_EQ(work->result->error().code, ErrorCode::mismatch);
}

}  // namespace
}  // namespace rejoin::collectives
