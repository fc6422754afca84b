// Two releases on one node, and what a job says of the releases in it.
#include <gtest/gtest.h>
#include <poll.h>

#include "base/bytes.h"
#include "base/fd.h"
#include "base/unix_socket.h"
#include "local.pb.h"
#include "tests/daemon_support.h"

namespace rejoin::test {
namespace {

// FromTrainer { hello { protocol, layout: 7, descriptors: 2 } }, as a library of protocol 15 says it: it is asked for
// the second descriptor, or told why it can't be taken.
TEST(Versions, ALibraryOfTheProtocolBeforeIsTakenAndOthersAreToldWhatToUpgrade) {
  Job job;
  job.start(1, 400);
  const auto answer_to = [&](char protocol, char layout) {
    const std::string hello = std::string("\x0a\x06\x08") + protocol + '\x10' + layout + "\x18\x02";
    const Fd socket = *connect_unix(job.socket(0)), something = *make_eventfd();
    EXPECT_TRUE(send_with_fds(socket, as_bytes(hello), {something.get()}));
    proto::ToTrainer answer;
    pollfd readable{socket.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&readable, 1, 10000), 1);
    const auto received = receive_with_fds(socket, 64 * KiB);
    EXPECT_TRUE(received && *received && answer.ParseFromString(std::string(as_text((*received)->bytes))));
    return answer;
  };
  EXPECT_TRUE(answer_to(15, 7).has_more());
  EXPECT_EQ(answer_to(14, 7).refusal(),
            "the trainer's library speaks protocol 14, and its daemon 15 to 16: upgrade the trainer's library first, "
            "to a release that speaks protocol 15 to 16");
  EXPECT_EQ(answer_to(17, 7).refusal(),
            "the trainer's library speaks protocol 17, and its daemon 15 to 16: upgrade its daemon first, to a "
            "release that speaks protocol 17");
  EXPECT_NE(answer_to(15, 8).refusal().find("page has layout 8"), std::string::npos);
}

TEST(Versions, AJobOfOneReleaseSaysSo) {
  Job job;
  job.start(1, 0);
  Process trainer({kMinimal}, job.file("trainer.out"), job.environment(0));
  const auto says = [&](const std::string& address, const std::string& what) {
    return eventually([&] { return run({kCli, "status", address}).output.find(what) != std::string::npos; });
  };
  EXPECT_TRUE(says(job.coordinator_status, "and speak protocol 16"));
  ASSERT_TRUE(eventually([&] { return job.status().at("versions").at("protocol") == 16; }));
  const auto versions = job.status().at("versions");
  EXPECT_FALSE(versions.at("mixed"));
  EXPECT_EQ(versions.at("ranks").at(0).at("release"), versions.at("release"));
  EXPECT_EQ(versions.at("nodes").at(0).at("some").at(0), "node0");
  EXPECT_TRUE(eventually([&] {
    return read_file(job.file("coordinator.out")).find("versions: all are of release") != std::string::npos;
  }));
}

}  // namespace
}  // namespace rejoin::test
