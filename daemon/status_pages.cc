#include "daemon/status_pages.h"

#include <openssl/evp.h>

#include <array>
#include <nlohmann/json.hpp>

#include "daemon/metrics.h"
#include "daemon/overview.h"
#include "daemon/page.h"

namespace rejoin::daemon {

namespace {

using nlohmann::json;
using Answer = StatusServer::Answer;

// Names and reasons come from others: bytes that are no text must not end this process.
std::string text_of(const json& document, int indent = -1) {
  return document.dump(indent, ' ', false, json::error_handler_t::replace) + "\n";
}

// 'sha256-…' of what stands between these tags: what a browser may run and apply, and nothing else.
std::string hash_of(std::string_view page, std::string_view begin, std::string_view end) {
  const auto first = page.find(begin) + begin.size();
  const auto inner = page.substr(first, page.find(end, first) - first);
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  EVP_Digest(inner.data(), inner.size(), digest.data(), &size, EVP_sha256(), nullptr);
  std::array<unsigned char, 2 * EVP_MAX_MD_SIZE> text{};
  const int length = EVP_EncodeBlock(text.data(), digest.data(), static_cast<int>(size));
  return "'sha256-" + std::string(text.begin(), text.begin() + length) + "'";
}

Answer plain(unsigned code, std::string text) {
  return {.code = code, .body = std::make_shared<std::string>(std::move(text))};
}

Answer page() {
  static const auto body = std::make_shared<const std::string>(kPage);
  static const std::string policy = "default-src 'none'; connect-src 'self'; frame-ancestors 'none'; script-src " +
                                    hash_of(kPage, "<script>", "</script>") + "; style-src " +
                                    hash_of(kPage, "<style>", "</style>") + "; img-src data:";
  return {.type = "text/html; charset=utf-8", .body = body, .policy = policy};
}

}  // namespace

Answer StatusPages::made_lately(const std::string& path, const char* type,
                                const std::function<std::string(const json&)>& make) {
  Made& made = made_[path];
  const TimePoint now = sources_.now();
  if (!made.body || now - made.at >= kKeepFor) made = {std::make_shared<std::string>(make(sources_.status())), now};
  return {.type = type, .body = made.body};
}

Answer StatusPages::answer(const std::string& path) {
  if (path == "/") return page();
  if (path == "/status")
    return made_lately(path, "application/json", [](const json& status) { return text_of(status, 2); });
  if (path == "/overview")
    return made_lately(path, "application/json", [this](const json& status) {
      return text_of(overview(status, sources_.history(), sources_.now()));
    });
  if (path == "/metrics")
    return made_lately(path, "text/plain; version=0.0.4; charset=utf-8",
                       [this](const json& status) { return metrics_text(status, sources_.history(), sources_.now()); });
  if (path == "/healthz") return plain(200, "ok\n");
  if (path == "/readyz") {
    Answer answer = made_lately(path, "text/plain; charset=utf-8", [](const json& status) {
      std::string why;
      for (const auto& line : not_ready(status)) why += line + "\n";
      return why;
    });
    if (answer.body->empty()) return plain(200, "ok\n");
    answer.code = 503;
    return answer;
  }
  return plain(404, "here are /, /status, /metrics, /overview, /healthz and /readyz\n");
}

std::vector<std::string> not_ready(const json& status) {
  std::vector<std::string> lines;
  if (status.contains("coordinator_role"))
    if (const auto& store = status.at("coordinator_role").at("store"); store.value("stalled", false))
      lines.push_back("the store does not take what is decided: " + store.value("failing", ""));
  for (const char* role : {"relay_role", "node_role"}) {
    if (!status.contains(role)) continue;
    const auto& coordinator = status.at(role).at("coordinator");
    if (coordinator.at("connected").get<bool>()) continue;
    lines.push_back("not connected with the coordinator at " + coordinator.at("address").get<std::string>() + ": " +
                    coordinator.at("reason").get<std::string>());
  }
  return lines;
}

}  // namespace rejoin::daemon
