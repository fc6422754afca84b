// What group.cc and configuration.cc share of a group's inside.
#pragma once

#include <set>

#include "collectives/wire.h"

namespace rejoin::collectives {

// Channels: one of all collectives, and for each tag two, by direction.
constexpr std::uint64_t kCollective = 0;
constexpr std::uint64_t kSends = 1ull << 32, kReceives = 2ull << 32;  // with the tag

enum class Stage : std::uint8_t {  // in this order
  missing,
  connecting,  // or connected, and not welcomed yet
  here,
  left,  // it has said goodbye
};

struct Group::Peer {
  Handle handle;
  transport::EndpointId endpoint;
  Stage stage = Stage::missing;
  std::uint32_t version = kOldest;  // that is spoken with it
  bool may_be_old = false;          // the next attempt to connect is for one that speaks the oldest version alone
  std::string not_reached;          // why the last attempt to connect did not begin
  bool has_failed = false;          // it has said so, and needs nothing more of this configuration
  bool heard_goodbye = false;       // of this member, or can't
  bool answered = false;            // its goodbye, or has closed the connection
};

// Memory of the group's own, registered: the host's or the GPU's.
struct Group::Scratch {
  Mapping mapping;
  std::optional<DeviceScratch> on_device;
  transport::RegionId region;
  std::span<std::byte> bytes() const { return on_device ? on_device->memory : mapping.span(); }
};

struct Group::Active {
  Operation operation;
  Key key{};
  std::optional<Scratch> scratch;
  std::vector<std::optional<transport::RegionId>> regions;  // by memory, registered when it is needed
  // By task.
  std::vector<std::uint32_t> blockers;
  std::vector<std::uint32_t> index;                           // of a receive, among those from its peer
  std::vector<std::optional<Ready>> ready;                    // of a send
  std::set<std::uint32_t> waits_for_ready;                    // sends that nothing else blocks
  std::map<std::uint32_t, std::vector<std::uint32_t>> sends;  // by peer
  std::size_t left = 0;                                       // tasks
  bool begun = false;                                         // the caller's stream has come to it
  bool on_device() const { return operation.signature.memory == transport::MemoryKind::cuda; }
};

}  // namespace rejoin::collectives
