#include <nlohmann/json.hpp>

#include "daemon/status_server.h"

// What anybody may send to the status port.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view request(reinterpret_cast<const char*>(data), size);
  const auto status = [] {
    return nlohmann::json{{"relay_role", {{"nodes", 1}, {"coordinator", {{"connected", true}}}}}};
  };
  const std::string answer = rejoin::daemon::answer_to(request, status);
  if (!answer.starts_with("HTTP/1.1 ")) __builtin_trap();
  return 0;
}
