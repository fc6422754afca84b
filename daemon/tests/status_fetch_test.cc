// Asking at an address whose port anybody may have.
#include "daemon/status_fetch.h"

#include <gtest/gtest.h>

#include <asio.hpp>
#include <future>
#include <nlohmann/json.hpp>

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;

// Answers so, and stays connected.
struct Answering {
  asio::io_context io{1};
  tcp::acceptor acceptor{io, {asio::ip::address_v4::loopback(), 0}};
  std::string address() const { return "127.0.0.1:" + std::to_string(acceptor.local_endpoint().port()); }

  Result<nlohmann::json> fetched(const std::string& answer, Texts texts = Texts::printable, bool ends = true) {
    auto status = std::async(std::launch::async, [&] { return fetch_status(address(), texts); });
    tcp::socket caller = acceptor.accept();
    asio::error_code gone;  // who has read enough
    asio::write(caller, asio::buffer(answer), gone);
    if (ends) caller.shutdown(tcp::socket::shutdown_send, gone);
    return status.get();
  }
};

TEST(StatusFetch, TakesControlCharactersOutOfWhatGoesToATerminal) {
  Answering strange;
  const std::string answer =
      "HTTP/1.1 200 OK\r\nA: b\r\n\r\n"
      R"({"node":"\u001b[31mX\n","of":[{"it":"\u0007 \u00e4"}]})";
  const auto as_it_is = strange.fetched(answer, Texts::as_they_are), printable = strange.fetched(answer);
  ASSERT_TRUE(as_it_is && printable);
  EXPECT_EQ(as_it_is->at("node"), "\x1b[31mX\n");
  EXPECT_EQ(printable->at("node"), "?[31mX?");
  EXPECT_EQ(printable->at("of").at(0).at("it"), "? \u00e4");
}

TEST(StatusFetch, ReadsNoMoreOfAHeadThatHasNoEndThanOneMayHave) {
  Answering endless;
  const auto status = endless.fetched(std::string(1 << 20, 'a'), Texts::printable, false);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::corrupt) << status.error().message;
}

}  // namespace
}  // namespace rejoin::daemon
