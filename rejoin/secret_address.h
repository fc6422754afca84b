// Where a process can be reached, as text, with a secret that lets in who has it, and with what both ends' transports
// have alike: a checkpoint server's address (checkpoint_transfer.h), a process group member's handle (process_group.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "rejoin/listen_config.h"
#include "transport/transport.h"

namespace rejoin::device {
class Device;
class Reducer;
}  // namespace rejoin::device

namespace rejoin {

// "SCHEME SECRET FAMILY ADDRESS"; the last is the transport's own, and may have spaces.
struct SecretAddress {
  std::array<std::uint64_t, 2> secret{};
  std::string family;  // of the transport, as family_of() names it
  std::string address;

  std::string text(std::string_view scheme) const;
  static std::string family_of(const std::string& transport);
  // `what` it should be is for the error, `invalid_argument`.
  static Result<SecretAddress> parse(std::string_view scheme, std::string_view what, const std::string& text);
};

// An engine that listens, and the address that others reach it at, with a secret of its own.
struct SecretListener {
  SecretAddress own;
  std::unique_ptr<transport::Engine> engine;

  // With a device, its memory goes over it, too, copied by the reducer alone where no NIC reaches it. Errors: of the
  // transport, of its address, and of the device.
  static Result<SecretListener> open(const ListenConfig& config,
                                     const std::shared_ptr<device::Device>& device = nullptr,
                                     const std::shared_ptr<device::Reducer>& reducer = nullptr);
};

}  // namespace rejoin
