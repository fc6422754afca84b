#include "daemon/doctor.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/ring_links.h"
#include "daemon/control_tls.h"
#include "transport/factory.h"

namespace rejoin::daemon {

using Verdict = Finding::Verdict;

std::string_view to_string(Verdict verdict) {
  switch (verdict) {
    case Verdict::ok: return "ok";
    case Verdict::warn: return "WARN";
    case Verdict::fail: return "FAIL";
    case Verdict::skipped: return "skipped";
  }
  return "?";
}

std::string line_of(const Finding& finding) {
  return fmt::format("{:<4}  {}: {}{}{}", to_string(finding.verdict), finding.check, finding.found,
                     finding.remedy.empty() ? "" : " -> ", finding.remedy);
}

std::string json_of(const Findings& findings) {
  nlohmann::json all = nlohmann::json::array();
  for (const auto& one : findings)
    all.push_back(
        {{"verdict", to_string(one.verdict)}, {"check", one.check}, {"found", one.found}, {"remedy", one.remedy}});
  return nlohmann::json{{"findings", std::move(all)}}.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

int exit_status(const Findings& findings, bool strict) {
  const auto has = [&](Verdict verdict) {
    return std::ranges::any_of(findings, [&](const auto& one) { return one.verdict == verdict; });
  };
  if (has(Verdict::fail)) return 2;
  return strict && has(Verdict::warn) ? 1 : 0;
}

// Errors name the thing, then, behind a semicolon, what to do.
Finding failed(std::string check, const Error& error, const std::string& remedy) {
  const auto border = error.message.find("; ");
  if (border == std::string::npos) return {Verdict::fail, std::move(check), error.message, remedy};
  return {Verdict::fail, std::move(check), error.message.substr(0, border), error.message.substr(border + 2)};
}

std::pair<std::string, std::string> split_at_upgrade(const std::string& refusal) {
  const auto border = refusal.find(": upgrade ");
  if (border == std::string::npos) return {refusal, "look at its log"};
  return {refusal.substr(0, border), refusal.substr(border + 2)};
}

bool uses_rdma(const DoctorSettings& settings) {
  const auto& name = settings.transport;
  if (!name.starts_with("ucx")) return name.starts_with("ibverbs");
  const auto has = [&](const char* one) { return name.find(one) != std::string::npos; };
  return has("rc") || has("dc") || has("ud") || has("ib") || has("all");  // by UCX's names
}

namespace {

std::optional<JobKeys> examine_keys(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  if (s.key_file.empty()) {
    findings.push_back({Verdict::skipped, "key", "no --job-key-file", ""});
    return std::nullopt;
  }
  auto keys = probes.keys(s.key_file, s.other_key_file);
  if (!keys) {
    const bool of_certificates = keys.error().message.starts_with("--tls-");
    findings.push_back(
        failed("key", keys.error(),
               of_certificates
                   ? "name a file in PEM form that the user who runs rejoind can read; 'openssl x509 -text -in' and "
                     "'openssl pkey -check -in' show what is in one"
                   : "give every node the job's key in a file of the user who runs rejoind: 'openssl rand -hex 32' "
                     "makes one, after 'umask 077'"));
    return std::nullopt;
  }
  findings.push_back({Verdict::ok, "key",
                      fmt::format("{}{}{} can be read, and is kept from others", s.key_file,
                                  s.other_key_file.empty() ? "" : " and ", s.other_key_file),
                      ""});
  if (const auto* own = keys->control().own(); own != nullptr && own->ends_soon(std::chrono::system_clock::now()))
    findings.push_back({Verdict::warn, "key",
                        fmt::format("the certificate {} ({}) ends soon", s.certificates.cert, own->text),
                        "renew it: a daemon that runs reads it again, and one that starts with an expired one ends"});
  return std::move(*keys);
}

void examine_limits(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  const auto limits = probes.limits();
  const auto needed = descriptors_needed(s);
  const std::string job =
      fmt::format("with {} replicas, and {} rank{} here,", s.replicas, s.ranks, s.ranks == 1 ? "" : "s");
  const auto fails = [&](std::string found, std::string remedy) {
    findings.push_back({Verdict::fail, "descriptors", std::move(found), std::move(remedy)});
  };
  if (const auto most = std::max(needed.daemon, needed.trainer); limits.descriptors_at_most < most)
    return fails(
        fmt::format("a process may open {} at most, and {} it needs {}", limits.descriptors_at_most, job, most),
        "'ulimit -Hn' as root; systemd: LimitNOFILE=1048576; containers: the runtime's ulimit nofile");
  if (limits.descriptors < needed.trainer)
    return fails(
        fmt::format("a trainer may open {}, and {} it needs {}", limits.descriptors, job, needed.trainer),
        fmt::format("'ulimit -n {}' where trainers are started; rejoind raises its own", limits.descriptors_at_most));
  findings.push_back({Verdict::ok, "descriptors",
                      fmt::format("{} a trainer needs {} and may open {}, and the daemon needs {} and may open {}", job,
                                  needed.trainer, limits.descriptors, needed.daemon, limits.descriptors_at_most),
                      ""});
}

void examine_encryption(const DoctorSettings& s, const Probes& probes, Findings& findings) {
  if (!s.transport.starts_with("tcp+aes")) return;
  const auto kernel = probes.kernel_tls();
  const bool asked = s.transport.find(";ktls=1") != std::string::npos;
  if (asked && !kernel)
    return findings.push_back({Verdict::warn, "encryption",
                               fmt::format("processes encrypt here, not the kernel: {}", kernel.error().message),
                               "nothing, if that is well: peers understand each other; or leave out ;ktls=1"});
  findings.push_back({Verdict::ok, "encryption",
                      asked    ? "the kernel encrypts for data connections with peers of ktls=1"
                      : kernel ? "processes encrypt; this kernel could, with ;ktls=1 behind the transport"
                               : "processes encrypt",
                      ""});
}

}  // namespace

// A trainer is connected with every other replica, or of a large job with those that it is linked with, and while it
// waits to be admitted and as the order changes with some more; a daemon, while its ranks catch up, for each of them
// with every other replica: by a socket for each rail, or by a socket and a doorbell of shared memory. A trainer takes
// of its daemon its socket twice, its process, its page and doorbell, and a few for its state. The rest are logs,
// sockets that listen, and what libraries open.
DescriptorsNeeded descriptors_needed(const DoctorSettings& s) {
  constexpr std::uint64_t of_trainer = 16, of_rail = 5;  // to listen, to sleep and to be woken
  const auto rails = std::uint64_t{transport::rails_of(s.transport)};
  const std::uint64_t of_process = 64 + of_rail * (rails - 1);
  const std::uint64_t others = s.replicas - 1;
  std::uint64_t links = others;
  if (const LinkRule rule{.full_mesh_members = s.full_mesh_members}; !rule.all(s.replicas)) {
    constexpr std::uint64_t meanwhile = 4;
    for (std::uint32_t one = 0; one < s.replicas; ++one)
      links = std::max<std::uint64_t>(one > 0 ? links : 0, links_of(rule, one, s.replicas, s.replicas).size());
    links = std::min(others, meanwhile * links);
  }
  const std::uint64_t of_one = std::max<std::uint64_t>(2, rails);
  return {.trainer = of_process + of_one * links, .daemon = of_process + (of_trainer + of_one * others) * s.ranks};
}

Findings examine(const DoctorSettings& settings, const Probes& probes) {
  Findings findings;
  const auto keys = examine_keys(settings, probes, findings);
  examine_socket(settings, probes, findings);
  examine_network(settings, probes, keys, findings);
  examine_pairs(settings, probes, keys, findings);
  examine_limits(settings, probes, findings);
  examine_encryption(settings, probes, findings);
  examine_devices(settings, probes, findings);
  return findings;
}

}  // namespace rejoin::daemon
