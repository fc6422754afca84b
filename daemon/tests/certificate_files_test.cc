// Files of certificates and keys that are damaged, or written in part as yet: nothing of one is used, and it is named.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>

#include "base/bytes.h"
#include "daemon/auth.h"
#include "daemon/control_tls.h"
#include "daemon/tests/authority.h"
#include "daemon/tests/meeting.h"

namespace rejoin::daemon {
namespace {

using test::Authority;
using test::kKey;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kRemedy = "; write it anew, the whole of it under another name, and rename that to this one";
constexpr const char* kBegin = "-----BEGIN CERTIFICATE-----\n";
constexpr const char* kEnd = "-----END CERTIFICATE-----\n";

struct CertificateFilesThat : testing::Test {
  const Authority ours{"ours"}, others{"others"}, third{"third"};
  test::Scratch scratch;
  const std::string first = test::read_file(ours.ca()), second = test::read_file(others.ca()),
                    last = test::read_file(third.ca());
  const std::ptrdiff_t lines = std::ranges::count(first, '\n');
  CertificateFiles files = ours.sign("own");

  std::string why() const {
    const auto made = JobKeys::with_certificates(JobKeys(kKey), files);
    return made ? "" : made.error().message;
  }
  std::string why_of_ca(const std::string& text) {
    files.ca = scratch.write("ca.pem", text, 0644);
    return why();
  }
  static std::string replaced(std::string text, const std::string& what, const std::string& by) {
    return text.replace(text.find(what), what.size(), by);
  }
};

TEST_F(CertificateFilesThat, AreDamagedAreNamedWithThePlaceAndTheRemedy) {
  const std::string at = fmt::format("(line {})", lines + 1), half = second.substr(0, second.size() / 2);
  const std::string cut = fmt::format("it ends in the midst of its block 2 {}", at);
  const std::string::size_type body = second.find('\n') + 10;
  const std::pair<std::string, std::string> all[] = {
      {first + half, cut},
      {first + kBegin, cut},
      {first + std::string(kBegin).substr(0, 18), cut},
      {first + "--", cut},
      {first + second.substr(0, second.rfind("-----END") + 9), cut},
      {first + half + "\n" + last, fmt::format("its block 2 {} has no end", at)},
      {first + second.substr(second.size() / 2) + last, "its block 2, which ends in line "},
      {first + replaced(second, "-----BEGIN CERT", "-----BEGIN CIRT") + last, fmt::format("its block 2 {}", at)},
      {first + replaced(second, "-----END CERT", "-----END CIRT") + last, fmt::format("its block 2 {}", at)},
      {first + replaced(second, "-----BEGIN", "----BEGIN") + last, "its block 2, which ends in line "},
      {first + kBegin + "AAAA\n" + kEnd + last, fmt::format("its block 2 {} can't be read", at)},
      {first + kBegin + kEnd + last, fmt::format("its block 2 {} can't be read", at)},
      {first + std::string(second).replace(body, 1, "!") + last, fmt::format("its block 2 {} can't be read", at)},
      {first + std::string(second).replace(second.find("MII"), 3, "MIJ") + last,
       fmt::format("its block 2 {} can't be read", at)},
      {first + std::string(second.size(), '\0'), fmt::format("line {} has a byte of value 0", lines + 1)},
      {"", "it is empty"},
      {"\n \n", "it is empty"},
  };
  for (const auto& [text, where] : all) {
    const std::string said = why_of_ca(text);
    EXPECT_THAT(said, AllOf(HasSubstr("--tls-ca " + files.ca + " is damaged: " + where), HasSubstr(kRemedy))) << text;
  }
  files.ca = ours.ca();
  const std::string own = test::read_file(files.cert), key = test::read_file(files.key);
  const auto cert = scratch.write("cert.pem", own + half, 0644);
  EXPECT_THAT((std::exchange(files.cert, cert), why()), AllOf(HasSubstr("--tls-cert " + cert + " is damaged: it ends"),
                                                              HasSubstr("block 2"), HasSubstr(kRemedy)));
  files = ours.sign("own");
  for (const auto& [text, where] : {std::pair{key.substr(0, key.size() / 2), "it ends in the midst of its block 1"},
                                    {replaced(key, "\n", "\n!"), "its block 1 (line 1) can't be read"},
                                    {std::string(), "it is empty"}}) {
    files.key = scratch.write("cut.key", text);
    EXPECT_THAT(why(), AllOf(HasSubstr("--tls-key " + files.key + " is damaged: " + where), HasSubstr(kRemedy)));
  }
}

TEST_F(CertificateFilesThat, HaveMoreInThemThanCertificatesAreTakenAsTheyAre) {
  const std::string key = test::read_file(files.key);
  std::string with_crlf = first;
  for (std::size_t at = 0; (at = with_crlf.find('\n', at)) != std::string::npos; at += 2) with_crlf.insert(at, "\r");
  for (const std::string& text :
       {first, first + second + last, second + "\n\n" + first, "\xef\xbb\xbf" + first, with_crlf + with_crlf,
        first.substr(0, first.size() - 1), "# Ours\n=====\n---\n" + first + "Subject: CN = others\n" + second + "# end",
        key + first, replaced(replaced(second, "BEGIN ", "BEGIN X509 "), "END ", "END X509 ") + first,
        "-----BEGIN OTHER-----\n!\n-----END OTHER-----\n" + first})
    EXPECT_EQ(why_of_ca(text), "") << text;
  files = ours.sign("own");
  const auto own = files;
  files.cert = files.key = scratch.write("both.pem",
                                         "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n"
                                         "-----END EC PARAMETERS-----\n" +
                                             test::read_file(own.key) + test::read_file(own.cert) + second);
  EXPECT_EQ(why(), "");
}

// As in the midst of a change of CAs, where a file is written in its place, or its disk is full.
TEST_F(CertificateFilesThat, AreDamagedWhileTheProcessRunsLeaveThoseThatWereReadInUse) {
  files.ca = scratch.write("ca.pem", first + second, 0644);
  const auto made = JobKeys::with_certificates(JobKeys(kKey), files);
  ASSERT_TRUE(made) << made.error().message;
  auto of_peer = others.sign("peer");
  of_peer.ca = others.ca_and(ours);
  const auto peer = JobKeys::with_certificates(JobKeys(kKey), of_peer);
  ASSERT_TRUE(peer) << peer.error().message;
  const auto said = [&] {
    testing::internal::CaptureStdout();
    made->control().look_after();
    return testing::internal::GetCapturedStdout();
  };
  const std::string own = test::read_file(files.cert), key = test::read_file(files.key);
  const auto damage = [&](const std::string& path, const std::string& whole, const std::string& part) {
    std::ofstream(path) << part;
    EXPECT_THAT(said(), AllOf(HasSubstr("warning"), HasSubstr("those read before stay in use"),
                              HasSubstr(path + " is damaged"), HasSubstr(kRemedy)));
    EXPECT_TRUE(test::meet(*peer, *made).in) << path;
    std::ofstream(path) << whole;
    EXPECT_THAT(said(), HasSubstr("the certificates have changed; ours: CN=own"));
  };
  damage(files.ca, first + second, first + second.substr(0, second.size() / 2));
  damage(files.ca, first + second, "");
  damage(files.cert, own, own.substr(0, own.size() / 2));
  damage(files.key, key, key.substr(0, key.size() / 2));
  EXPECT_TRUE(test::meet(*peer, *made).in);
}

// gRPC reads them, and says nothing of what it finds.
TEST_F(CertificateFilesThat, AreForEtcdAreLookedAtLikewise) {
  const std::string key = test::read_file(files.key);
  const auto cert_says = [&](const std::string& text) {
    const auto right = check_certificates("--etcd-ca", scratch.write("ca.pem", text, 0644));
    return right ? "" : right.error().message;
  };
  const auto key_says = [&](const std::string& text) {
    const auto right = check_private_key("--etcd-key", scratch.write("etcd.key", text));
    return right ? "" : right.error().message;
  };
  EXPECT_EQ(cert_says(first + second), "");
  EXPECT_EQ(cert_says(key + first), "");
  EXPECT_EQ(key_says(key), "");
  EXPECT_EQ(key_says(first + key), "");
  for (const std::string& text : {first.substr(0, 300), first + second.substr(0, 300)})
    EXPECT_THAT(cert_says(text), AllOf(HasSubstr("--etcd-ca "), HasSubstr("is damaged: it ends"), HasSubstr(kRemedy)));
  EXPECT_THAT(cert_says(key), HasSubstr("has no certificate in PEM form"));
  EXPECT_THAT(key_says(key.substr(0, 100)), AllOf(HasSubstr("--etcd-key "), HasSubstr("is damaged: it ends")));
  EXPECT_THAT(key_says(first), HasSubstr("--etcd-key " + scratch.path));
  EXPECT_THAT(key_says(first), HasSubstr("has no private key in PEM form"));
}

}  // namespace
}  // namespace rejoin::daemon
