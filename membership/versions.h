// Which version of the protocol each end speaks, and what may be said to it. See "Two versions in a job" in
// docs/design-notes.md.
//
// A release speaks the protocol of the one before, too. Who opens a connection says both numbers, and the two speak the
// newer one that both have. What came with a later version is said to nobody who does not speak that: features are
// listed here, each with the version that it came with, and asked for by name. What all members have to do alike is
// decided by the coordinator, by the version that all of them speak in an epoch (Coordinator::protocol).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace rejoin::membership {

constexpr std::uint32_t kProtocolVersion = 16, kOldestProtocol = 15;
// The last version whose speakers say one number and not which versions they speak.
constexpr std::uint32_t kSilentProtocol = 15;

enum class Feature : std::uint32_t {
  welcome = 16,   // NodeWelcome: a listener says what it speaks, or why it refuses
  chunking = 16,  // members cut buckets in the host's memory into smaller chunks (ftar::Chunking)
  stages = 16,    // ranks of a replica declare different things, in the log one by one
  balance = 16,   // --balance-batches: replicas train different numbers of samples, and weigh their gradients
};

// The versions that one end speaks, from the oldest to the newest.
struct Versions {
  std::uint32_t oldest = kOldestProtocol, newest = kProtocolVersion;
  bool operator==(const Versions&) const = default;
  std::string text() const;  // "15 to 16"

  // Reads them from a hello (NodeHello, LocalHello) or a NodeWelcome.
  static Versions of(const auto& hello) {
    return {hello.protocol(), std::max<std::uint32_t>(hello.protocol(), hello.newest())};
  }
  void put_into(auto& hello) const {
    hello.set_protocol(oldest);
    hello.set_newest(newest);
  }
};

// Returns the newest version that both speak; nothing where there is none.
std::optional<std::uint32_t> agreed(const Versions& one, const Versions& other);

// Says why the two can't speak with each other, and which of them is to be upgraded. `theirs` are the versions of
// `who`.
std::string why_refused(std::string_view who, const Versions& theirs, std::string_view self, const Versions& own = {});

// The version that is spoken with one peer. Until the peer has said what it speaks, it is one that everybody does.
class Spoken {
 public:
  explicit Spoken(std::uint32_t version = kSilentProtocol) : version_(version) {}
  // Returns the newest version that both speak, for a peer that has not been refused.
  static Spoken with(const Versions& theirs) { return Spoken(agreed({}, theirs).value_or(kSilentProtocol)); }
  // Returns what is spoken in an epoch whose plan or record says `said`; 0: nothing, as those of kSilentProtocol do.
  static Spoken in_epoch(std::uint32_t said) { return Spoken(std::max(said, kSilentProtocol)); }
  // Returns the version for a sender whose message says `said` (RankUp.speaks) and came over a connection that speaks
  // `by`: no more than either.
  static Spoken through(std::uint32_t said, Spoken by) {
    return Spoken(std::min(said == 0 ? kSilentProtocol : said, by.version_));
  }
  std::uint32_t version() const { return version_; }
  bool may(Feature feature) const { return version_ >= static_cast<std::uint32_t>(feature); }

 private:
  std::uint32_t version_;
};

}  // namespace rejoin::membership
