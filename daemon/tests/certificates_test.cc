// Control connections with certificates: who has none, one that is worth nothing here, or not the job's key, stays out,
// and both sides say why.
#include "daemon/certificates.h"

#include <gmock/gmock.h>

#include <asio.hpp>
#include <asio/ssl/stream.hpp>
#include <filesystem>
#include <fstream>

#include "daemon/auth.h"
#include "daemon/control_tls.h"
#include "daemon/framed.h"
#include "daemon/tests/authority.h"
#include "daemon/tests/meeting.h"

namespace rejoin::daemon {
namespace {

using asio::ip::tcp;
using test::Authority;
using test::kKey;
using test::kOther;
using test::meet;
using test::Met;
using testing::AllOf;
using testing::HasSubstr;

constexpr const char* kOtherKey = "its job key differs from ours; give both the same --job-key-file";

JobKeys keys_with(const CertificateFiles& files, JobKeys keys = JobKeys(kKey)) {
  auto made = JobKeys::with_certificates(std::move(keys), files);
  EXPECT_TRUE(made) << made.error().message;
  return made.value();
}

TEST(Certificates, BothSidesHaveOneAndTheKeyAndTalk) {
  const Authority authority;
  const JobKeys node = keys_with(authority.sign("node", {.names = ""})), coordinator = keys_with(authority.sign("c0"));
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const Met met = meet(node, coordinator, host);
    EXPECT_TRUE(met.in) << met.client << "; " << met.server;
  }
  const JobKeys in_all_networks = keys_with(authority.sign("c1", {.names = "IP:::1,DNS:*.example.org"}));
  for (const char* host : {"::1", "c1.example.org"}) EXPECT_TRUE(meet(node, in_all_networks, host).in) << host;
}

TEST(StrangersWithCertificates, WithOneOfAnotherAuthorityAreRefusedOnBothSides) {
  const Authority ours, others("others");
  const JobKeys right = keys_with(ours.sign("right")), foreign = keys_with(others.sign("foreign"));
  const Met comes = meet(foreign, right), is_asked = meet(right, foreign);
  EXPECT_TRUE(comes.refused);
  EXPECT_THAT(comes.client,
              AllOf(HasSubstr("CN=right"), HasSubstr("is not signed by a CA in our --tls-ca " + others.ca())));
  EXPECT_THAT(comes.server, HasSubstr("does not take our --tls-cert"));
  EXPECT_TRUE(is_asked.refused);
  EXPECT_THAT(is_asked.client,
              AllOf(HasSubstr("CN=foreign"), HasSubstr("is not signed by a CA in our --tls-ca " + ours.ca())));
  // One that takes ours, and so comes as far as to show its own.
  CertificateFiles trusting = others.sign("trusting");
  trusting.ca = others.ca_and(ours);
  const Met trusts = meet(keys_with(trusting), right);
  EXPECT_TRUE(trusts.refused);
  EXPECT_THAT(trusts.server,
              AllOf(HasSubstr("CN=trusting"), HasSubstr("is not signed by a CA in our --tls-ca " + ours.ca())));
  EXPECT_THAT(trusts.client, AllOf(HasSubstr("does not take our --tls-cert " + trusting.cert), HasSubstr("one CA")));
}

// Read while they were valid.
TEST(StrangersWithCertificates, WithOneThatIsNotValidNowAreRefused) {
  const Authority authority;
  const JobKeys right = keys_with(authority.sign("right"));
  // As short as this machine is quick enough for.
  CertificateFiles soon;
  std::optional<JobKeys> read;
  for (long until = 1; !read; until *= 2) {
    ASSERT_LE(until, 64);
    soon = authority.sign("short", {.until = until});
    if (auto made = JobKeys::with_certificates(JobKeys(kKey), soon)) read = *made;
  }
  const JobKeys& expired = *read;
  ASSERT_TRUE(test::eventually([&] { return !JobKeys::with_certificates(JobKeys(kKey), soon); }));
  const Met comes = meet(expired, right), is_asked = meet(right, expired);
  EXPECT_TRUE(comes.refused);
  EXPECT_THAT(comes.server, AllOf(HasSubstr("CN=short"), HasSubstr("has expired at 20"), HasSubstr("renew it")));
  EXPECT_THAT(comes.client, AllOf(HasSubstr("does not take our --tls-cert " + soon.cert), HasSubstr("renew it")));
  EXPECT_TRUE(is_asked.refused);
  EXPECT_THAT(is_asked.client, HasSubstr("has expired at 20"));
  EXPECT_THAT(is_asked.server, HasSubstr("does not take our --tls-cert " + soon.cert));
}

TEST(StrangersWithCertificates, ThatAreNotForTheNameOrTheRoleAreRefused) {
  const Authority authority;
  const JobKeys right = keys_with(authority.sign("right"));
  for (const char* names : {"DNS:elsewhere,IP:127.0.0.2", ""}) {
    const JobKeys elsewhere = keys_with(authority.sign("elsewhere", {.names = names}));
    for (const char* host : {"127.0.0.1", "localhost"}) {
      const Met met = meet(right, elsewhere, host);
      EXPECT_TRUE(met.refused);
      EXPECT_THAT(met.client, AllOf(HasSubstr("CN=elsewhere"),
                                    HasSubstr(*names == '\0' ? "no name" : "DNS:elsewhere, IP Address:127.0.0.2"),
                                    HasSubstr(std::string("it was asked for as ") + host)));
      EXPECT_THAT(met.server, HasSubstr("does not take our --tls-cert"));
    }
    EXPECT_TRUE(meet(elsewhere, elsewhere).in) << "whoever shows our own certificate has its key: it is this process";
  }
  const JobKeys client = keys_with(authority.sign("client", {.usage = "clientAuth"}));
  const JobKeys server = keys_with(authority.sign("server", {.usage = "serverAuth"}));
  EXPECT_TRUE(meet(client, server).in);
  const Met swapped = meet(right, client), from_server = meet(server, right);
  EXPECT_TRUE(swapped.refused);
  EXPECT_THAT(swapped.client, HasSubstr("sign it with the extendedKeyUsage serverAuth"));
  EXPECT_TRUE(from_server.refused);
  EXPECT_THAT(from_server.server, HasSubstr("sign it with the extendedKeyUsage clientAuth"));
}

TEST(StrangersWithCertificates, WithTheKeyAndNoneAreRefusedAndWithOneAndWithoutTheKeyToo) {
  const Authority authority;
  const JobKeys right = keys_with(authority.sign("right")), bare(kKey);
  const Met none = meet(bare, right), asks_none = meet(right, bare);
  EXPECT_TRUE(none.refused);
  EXPECT_THAT(none.server, HasSubstr("it has no certificate, and this process asks for one"));
  EXPECT_THAT(none.client, HasSubstr("it asks for a certificate, and this process has none; give this one --tls-ca"));
  EXPECT_TRUE(asks_none.refused);
  EXPECT_THAT(asks_none.server, HasSubstr("it has a certificate, and this process none; give this one --tls-ca"));
  EXPECT_THAT(asks_none.client, HasSubstr("it has no certificate, and this process asks for one"));

  const JobKeys other = keys_with(authority.sign("other"), JobKeys(kOther));
  for (const Met& met : {meet(other, right), meet(right, other)}) {
    EXPECT_TRUE(met.refused);
    EXPECT_EQ(met.client, kOtherKey);
    EXPECT_EQ(met.server, kOtherKey);
  }
}

TEST(Certificates, AJobKeyIsChangedWithThemToo) {
  const Authority authority;
  const auto files = authority.sign("both");
  const JobKeys old = keys_with(files), old_and_new = keys_with(files, JobKeys(kKey, kOther)),
                new_and_old = keys_with(files, JobKeys(kOther, kKey)), renewed = keys_with(files, JobKeys(kOther));
  for (const auto* caller : {&old, &old_and_new})
    for (const auto* listener : {&old, &old_and_new, &new_and_old}) EXPECT_TRUE(meet(*caller, *listener).in);
  for (const auto* caller : {&renewed, &new_and_old})
    for (const auto* listener : {&renewed, &old_and_new, &new_and_old}) EXPECT_TRUE(meet(*caller, *listener).in);
  EXPECT_TRUE(meet(old_and_new, renewed).refused);
  EXPECT_TRUE(meet(new_and_old, old).refused);
}

// Who has a certificate, and no key: it sends back what it has heard, or what was said on another connection.
TEST(StrangersWithCertificates, AProofOfAnotherConnectionIsNone) {
  const Authority authority;
  const JobKeys right = keys_with(authority.sign("right"));
  const auto files = authority.sign("thief");
  asio::io_context io{1};
  tcp::acceptor acceptor{io, tcp::endpoint(asio::ip::address_v4::loopback(), 0)};
  asio::ssl::context context(asio::ssl::context::tlsv13);
  ASSERT_TRUE(use_certificates(context.native_handle(), files));
  const std::string_view protocol = "\x22rejoin control 3 with certificates";
  ::SSL_CTX_set_alpn_protos(context.native_handle(), reinterpret_cast<const unsigned char*>(protocol.data()),
                            static_cast<unsigned>(protocol.size()));
  struct Server {
    std::shared_ptr<Framed> framed;
    bool ready = false;
    std::string why;
  };
  const auto serve = [&](Server& server) {
    server.framed = std::make_shared<Framed>(acceptor.accept(), right, true);
    server.framed->start({.ready = [&] { server.ready = true; },
                          .message = [](std::string_view) {},
                          .closed = [&](const std::string& why) { server.why = why; }},
                         std::chrono::seconds(5));
  };
  // A client with the key whose way leads over the thief: it can't, since the client would not take the thief's word
  // for the server's; so the thief has the proof from one that has asked for it.
  std::array<std::byte, 40> overheard{};
  {
    asio::ssl::context listening(asio::ssl::context::tlsv13);
    ASSERT_TRUE(use_certificates(listening.native_handle(), files));
    ::SSL_CTX_set_alpn_select_cb(
        listening.native_handle(),
        [](SSL*, const unsigned char** chosen, unsigned char* length, const unsigned char* offered, unsigned, void*) {
          *chosen = offered + 1;
          *length = *offered;
          return SSL_TLSEXT_ERR_OK;
        },
        nullptr);
    tcp::socket socket(io);
    socket.connect(acceptor.local_endpoint());
    const auto client = std::make_shared<Framed>(std::move(socket), right, false, "127.0.0.1");
    client->start({.ready = [] { FAIL() << "it takes the thief for the coordinator"; },
                   .message = [](std::string_view) {},
                   .closed = [](const std::string&) {}},
                  std::chrono::seconds(5));
    asio::ssl::stream<tcp::socket> thief(acceptor.accept(), listening);
    bool heard = false;
    thief.async_handshake(asio::ssl::stream_base::server, [&](asio::error_code error) {
      ASSERT_FALSE(error) << error.message();
      asio::async_read(thief, asio::buffer(overheard), [&](asio::error_code failed, std::size_t) {
        ASSERT_FALSE(failed) << failed.message();
        heard = true;
      });
    });
    while (!heard) io.run_one();
    // Sent back, it is no proof of the other direction.
    asio::write(thief, asio::buffer(overheard.data() + 8, 32));
    bool over = false;
    char answer[64];
    thief.async_read_some(asio::buffer(answer), [&](asio::error_code, std::size_t) { over = true; });
    while (!over) io.run_one();
    EXPECT_TRUE(client->refused());
  }
  io.restart();
  tcp::socket socket(io);
  socket.connect(acceptor.local_endpoint());
  Server server;
  serve(server);
  asio::ssl::stream<tcp::socket> thief(std::move(socket), context);
  std::array<std::byte, 32> answer{};
  answer.fill(std::byte{1});
  thief.async_handshake(asio::ssl::stream_base::client, [&](asio::error_code error) {
    ASSERT_FALSE(error) << error.message();
    asio::async_write(thief, asio::buffer(overheard), [&](asio::error_code, std::size_t) {
      asio::async_read(thief, asio::buffer(answer), [](asio::error_code, std::size_t) {});
    });
  });
  while (server.why.empty()) io.run_one();
  EXPECT_FALSE(server.ready);
  EXPECT_TRUE(server.framed->refused());
  EXPECT_EQ(server.why, kOtherKey);
  io.run_for(std::chrono::seconds(1));
  EXPECT_EQ(answer, (std::array<std::byte, 32>{})) << "who has not the key hears no proof of it";
}

TEST(Certificates, ThatHaveChangedAreReadAgainAndThoseBeforeStayWhereTheNewOnesAreWorthNothing) {
  const Authority authority, others("others");
  auto files = authority.sign("rotated");
  files.ca = authority.file("trusted.pem");
  std::filesystem::copy_file(authority.ca(), files.ca);
  auto of_peer = authority.sign("peer");
  of_peer.ca = authority.ca_and(others);
  const JobKeys rotated = keys_with(files), peer = keys_with(of_peer);
  EXPECT_TRUE(meet(peer, rotated).in);
  // Half of a pair is there: the key that fits is not, yet.
  const auto renewed = authority.sign("renewed");
  std::filesystem::rename(renewed.cert, files.cert);
  EXPECT_TRUE(meet(peer, rotated).in);
  std::filesystem::rename(renewed.key, files.key);
  EXPECT_TRUE(meet(peer, rotated).in);
  // Another authority alone, which has not signed what is here: nobody would take it.
  std::filesystem::copy_file(others.ca(), files.ca + ".new");
  std::filesystem::rename(files.ca + ".new", files.ca);
  EXPECT_TRUE(meet(peer, rotated).in);
  const auto moved = others.sign("moved");
  std::filesystem::rename(moved.cert, files.cert);
  std::filesystem::rename(moved.key, files.key);
  EXPECT_THAT(meet(peer, rotated).server, AllOf(HasSubstr("CN=peer"), HasSubstr("is not signed by a CA")));
  std::filesystem::remove(files.ca);
  EXPECT_TRUE(meet(peer, rotated).refused);
}

// A CA's clock may be ahead of ours, and a certificate may be laid ready before it begins.
TEST(Certificates, ThatWereNotValidYetWhenTheyWereLookedAtAreTakenOnceTheyAre) {
  const Authority old("old"), authority;
  auto files = old.sign("rotated");
  files.ca = old.ca_and(authority);
  const JobKeys rotated = keys_with(files), peer = keys_with(authority.sign("peer"));
  EXPECT_TRUE(meet(peer, rotated).refused) << "only who has the new certificate is taken by this peer";
  const auto renewed = authority.sign("renewed", {.from = 2});
  std::filesystem::rename(renewed.key, files.key);
  std::filesystem::rename(renewed.cert, files.cert);
  (void)meet(peer, rotated);  // they are looked at, as early as this machine is quick enough for
  EXPECT_TRUE(test::eventually([&] { return meet(peer, rotated).in; }));
}

TEST(Certificates, OneThatEndsSoonOrHasEndedIsNamedInTheLogNowAndThen) {
  const Authority authority;
  auto files = authority.sign("renewed", {.from = -3600, .until = 3600});
  const JobKeys keys = keys_with(files);
  const auto said = [&] {
    testing::internal::CaptureStdout();
    keys.control().look_after();
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_EQ(said(), "") << "half of its life is left";
  const auto put = [&](long until) {
    const auto next = authority.sign("next", {.from = -3600, .until = until});
    std::filesystem::rename(next.key, files.key);
    std::filesystem::rename(next.cert, files.cert);
  };
  put(600);
  EXPECT_THAT(said(),
              AllOf(HasSubstr("certificates have changed"), HasSubstr("CN=next"), HasSubstr("ends soon: renew it")));
  EXPECT_EQ(said(), "") << "it was said just now";
  std::string lines;
  for (long until = 1; lines.find("certificates have changed; ours") == lines.npos; until *= 2) {
    ASSERT_LE(until, 64);
    put(until);
    lines = said();
  }
  EXPECT_TRUE(test::eventually([&] { return (lines = said()) != ""; }, std::chrono::seconds(100)));
  EXPECT_THAT(lines, AllOf(HasSubstr("error"), HasSubstr("CN=next"), HasSubstr("has ended"), HasSubstr("renew it")));
  EXPECT_EQ(said(), "");
  put(3600);
  EXPECT_THAT(said(), HasSubstr("the certificates have changed; ours: CN=next"));
  EXPECT_EQ(said(), "");
  EXPECT_LT(keys.control().own()->until, std::chrono::system_clock::now() + std::chrono::hours(1));
}

TEST(Certificates, FilesThatCannotBeUsedAreNamedWithTheRemedy) {
  const Authority authority;
  const auto right = authority.sign("right"), other = authority.sign("other");
  const auto why = [](const CertificateFiles& files) {
    const auto made = JobKeys::with_certificates(JobKeys(kKey), files);
    return made ? "" : made.error().message;
  };
  EXPECT_EQ(why(right), "");
  const auto with = [&](std::string CertificateFiles::*which, const std::string& path) {
    auto files = right;
    files.*which = path;
    return why(files);
  };
  using F = CertificateFiles;
  const auto file = [&](const char* name, const std::string& text) {
    std::ofstream(authority.file(name)) << text;
    std::filesystem::permissions(authority.file(name), std::filesystem::perms::owner_read);
    return authority.file(name);
  };
  EXPECT_EQ(with(&F::ca, "/nowhere"), "--tls-ca /nowhere: No such file or directory");
  EXPECT_EQ(with(&F::cert, "/nowhere"), "--tls-cert /nowhere: No such file or directory");
  EXPECT_EQ(with(&F::key, "/nowhere"), "--tls-key /nowhere: No such file or directory");
  EXPECT_THAT(with(&F::ca, "/dev/zero"), HasSubstr("is no regular file"));
  EXPECT_THAT(with(&F::cert, file("garbage", "garbage")),
              HasSubstr("garbage has no certificate in PEM form; convert it"));
  EXPECT_THAT(with(&F::ca, right.key), HasSubstr("has no certificate in PEM form"));
  EXPECT_THAT(with(&F::key, file("pem", "-----BEGAN")), HasSubstr("has no private key in PEM form; convert it"));
  EXPECT_THAT(with(&F::key, other.key),
              AllOf(HasSubstr("does not belong to --tls-cert " + right.cert), HasSubstr("CN=right")));
  EXPECT_THAT(with(&F::ca, file("long", std::string(2 << 20, 'x'))), HasSubstr("over the limit"));
  const auto expired = authority.sign("expired", {.until = -60}), early = authority.sign("early", {.from = 600});
  EXPECT_THAT(why(expired), AllOf(HasSubstr(expired.cert), HasSubstr("CN=expired"), HasSubstr("has expired at"),
                                  HasSubstr("renew it")));
  EXPECT_THAT(why(early), AllOf(HasSubstr(early.cert), HasSubstr("is valid from"), HasSubstr("clock")));
  std::filesystem::permissions(right.key, std::filesystem::perms(0644));
  EXPECT_THAT(why(right), AllOf(HasSubstr(right.key + " has mode 0644"), HasSubstr("chmod 600")));
  EXPECT_THAT(check({.ca = "a"}).error().message, HasSubstr("--tls-ca without --tls-cert and --tls-key"));
  EXPECT_THAT(check({.cert = "a", .key = "b"}).error().message, HasSubstr("--tls-cert and --tls-key without --tls-ca"));
  EXPECT_TRUE(check({}));
}

// Where a variable is empty, there are none, and nobody would know.
TEST(Certificates, AProcessSaysAtItsStartWhetherItHasThem) {
  const Authority authority;
  const auto files = authority.sign("right");
  const std::string key = files.key;  // any file of mode 600
  const auto said = [&](const CertificateFiles& given) {
    testing::internal::CaptureStdout();
    const auto read = JobKeys::read(key, "", given);
    const std::string lines = testing::internal::GetCapturedStdout();
    EXPECT_TRUE(read) << read.error().message;
    return lines;
  };
  EXPECT_THAT(said({}), HasSubstr("control connections need the job key alone"));
  EXPECT_THAT(said(files), AllOf(HasSubstr("control connections need certificates"), HasSubstr("CN=right")));
}

// A passphrase would be asked for at a terminal that nobody looks at.
TEST(Certificates, AKeyWithAPassphraseIsRefused) {
  const Authority authority;
  auto files = authority.sign("right");
  const std::unique_ptr<BIO, decltype(&::BIO_free)> in(::BIO_new_file(files.key.c_str(), "r"), &::BIO_free);
  const std::unique_ptr<EVP_PKEY, decltype(&::EVP_PKEY_free)> key(
      ::PEM_read_bio_PrivateKey(in.get(), nullptr, nullptr, nullptr), &::EVP_PKEY_free);
  const std::unique_ptr<BIO, decltype(&::BIO_free)> out(::BIO_new_file(files.key.c_str(), "w"), &::BIO_free);
  char phrase[] = "secret";
  ASSERT_EQ(::PEM_write_bio_PrivateKey(out.get(), key.get(), ::EVP_aes_128_cbc(), nullptr, 0, nullptr, phrase), 1);
  ASSERT_EQ(BIO_flush(out.get()), 1);
  const auto made = JobKeys::with_certificates(JobKeys(kKey), files);
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().message, AllOf(HasSubstr(files.key), HasSubstr("passphrase"), HasSubstr("openssl pkey")));
}

}  // namespace
}  // namespace rejoin::daemon
