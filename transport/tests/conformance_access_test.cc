// What every backend must do: peers may do with a region what it is registered for, and nothing else.
#include <fmt/format.h>

#include <algorithm>

#include "base/fd.h"
#include "transport/tests/conformance.h"
#include "transport/tests/same_bytes.h"

namespace rejoin::transport {
namespace {

TEST_P(Conformance, PeersCanDoWithARegionWhatItsAccessAllowsAndNothingElse) {
  auto p = pair();
  std::uint64_t context = 0;
  for (const Access access : {Access::local, Access::remote_read, Access::remote_write, kAnyAccess})
    for (const bool in_file : {false, true})
      for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{100}, 300 * KiB}) {
        SCOPED_TRACE(fmt::format("access {}, {} bytes{}", static_cast<int>(access), size, in_file ? " of a file" : ""));
        constexpr std::size_t all = 512 * KiB;
        auto mapping = in_file ? Mapping::shareable(all) : Mapping::anonymous(all);
        ASSERT_TRUE(mapping) << mapping.error().message;
        const std::span<std::byte> there = mapping->span();
        std::fill(there.begin(), there.end(), std::byte{1});
        std::vector<std::byte> here(all, std::byte{2});
        const RegionId mine = *p.a.engine->register_region(here, kind, Access::local);
        const RegionId theirs = *p.b.engine->register_region(there, kind, access);
        const RemoteRange remote{p.b.engine->remote(theirs), 0};
        const auto outcome_of = [&](bool reads) {
          const std::uint64_t refused = p.b.engine->refused(), number = ++context;
          const Write write{.context = number, .local = {mine, 0}, .remote = remote, .length = size, .notify = number};
          const Read read{.context = number, .local = {mine, 0}, .remote = remote, .length = size};
          EXPECT_TRUE(reads ? p.a.engine->read(p.at_a, {&read, 1}) : p.a.engine->write(p.at_a, {&write, 1}));
          EXPECT_TRUE(until([&] { return p.a.completions[number] > 0; }));
          const bool allowed = allows(access, reads ? Access::remote_read : Access::remote_write);
          if (!allowed) EXPECT_TRUE(until([&] { return p.b.engine->refused() > refused; })) << "it was not counted";
          if (allowed) EXPECT_EQ(p.b.engine->refused(), refused);
          EXPECT_EQ(p.a.completions[number], 1);
          return p.a.outcome[number];
        };

        const auto read = outcome_of(true);
        EXPECT_EQ(read.has_value(), !allows(access, Access::remote_read));
        if (read) {
          EXPECT_EQ(read->code, ErrorCode::refused);
          EXPECT_NE(read->message.find("without remote read"), std::string::npos) << read->message;
        }
        const auto expect_in = [&](std::span<const std::byte> memory, std::uint64_t brought, std::byte by,
                                   std::byte else_) {
          EXPECT_TRUE(all_are(by, memory.first(brought)) && all_are(else_, memory.subspan(brought)));
        };
        expect_in(here, read ? 0 : size, std::byte{1}, std::byte{2});

        std::fill(here.begin(), here.end(), std::byte{2});
        const std::size_t notified = p.b.written.size();
        const auto write = outcome_of(false);
        EXPECT_EQ(write.has_value(), !allows(access, Access::remote_write));
        if (write) {
          EXPECT_EQ(write->code, ErrorCode::refused);
          EXPECT_NE(write->message.find("without remote write"), std::string::npos) << write->message;
        } else {
          EXPECT_TRUE(until([&] { return p.b.written.size() > notified; }));
        }
        EXPECT_EQ(p.b.written.size(), notified + (write ? 0 : 1));
        expect_in(there, write ? 0 : size, std::byte{2}, std::byte{1});
        p.a.engine->deregister(mine);
        p.b.engine->deregister(theirs);
      }
  EXPECT_TRUE(p.a.closed.empty() && p.b.closed.empty());
}

// One refused operation costs those beside it nothing, in one call or in several.
TEST_P(Conformance, WhatIsRefusedLeavesTheOperationsBesideItAlone) {
  auto p = pair();
  constexpr std::uint64_t size = 96 * KiB, rounds = 20;
  std::vector<std::byte> here(size, std::byte{2}), open(size), closed(size);
  const RegionId mine = *p.a.engine->register_region(here, kind, Access::local);
  const RegionId good = *p.b.engine->register_region(open, kind, Access::remote_write);
  const RegionId bad = *p.b.engine->register_region(closed, kind, Access::remote_read);
  for (std::uint64_t i = 0; i < rounds; ++i) {
    const auto write = [&](std::uint64_t context, RegionId region) {
      return Write{.context = context,
                   .local = {mine, 0},
                   .remote = {p.b.engine->remote(region), 0},
                   .length = size,
                   .notify = context};
    };
    const Write writes[] = {write(3 * i, good), write(3 * i + 1, bad), write(3 * i + 2, good)};
    ASSERT_TRUE(p.a.engine->write(p.at_a, writes));
  }
  ASSERT_TRUE(until([&] { return p.a.completions.size() == 3 * rounds && p.b.written.size() >= 2 * rounds; }));
  ASSERT_TRUE(p.a.engine->send(p.at_a, as_bytes("still here")));
  ASSERT_TRUE(until([&] { return !p.b.messages.empty(); }));
  EXPECT_EQ(p.b.written.size(), 2 * rounds);
  for (const auto& [context, error] : p.a.outcome) EXPECT_EQ(error.has_value(), context % 3 == 1) << context;
  EXPECT_EQ(open, here);
  EXPECT_TRUE(all_are(std::byte{0}, closed));
  EXPECT_GE(p.b.engine->refused(), rounds);
}

}  // namespace
}  // namespace rejoin::transport
