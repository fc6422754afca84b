// An engine over another one, which counts what passes.
#pragma once

#include <algorithm>
#include <map>
#include <memory>

#include "ftar/operation.h"
#include "transport/transport.h"

namespace rejoin::ftar {

// What a communicator, or the staged engine with its slots, makes of the engine below it.
class Counting final : public transport::Engine {
 public:
  Counting(std::unique_ptr<transport::Engine> below, std::uint64_t& transfers)
      : below_(std::move(below)), transfers_(transfers) {}
  std::map<std::uint32_t, std::uint64_t> messages;  // of a communicator, by kind
  transport::EndpointId last_sent_to;
  std::uint64_t views = 0;
  std::map<std::pair<transport::EndpointId, std::uint64_t>, std::uint64_t> in_flight;  // writes, by their context
  std::uint64_t most_gathered = 0;  // chunks of a result that were in flight at once, of a bucket, to one peer one way
  bool misplace_views = false;      // it tells peers to look where nothing is
  Result<transport::Address> listen(const transport::Address& where) override { return below_->listen(where); }
  Result<transport::EndpointId> connect(const transport::Address& peer, BytesView hello) override {
    return below_->connect(peer, hello);
  }
  Result<transport::RegionId> register_region(std::span<std::byte> memory, transport::MemoryKind kind,
                                              transport::Access access) override {
    return below_->register_region(memory, kind, access);
  }
  Result<transport::RegionId> register_dma_buf(const transport::DmaBuf& buffer, transport::Access access) override {
    return below_->register_dma_buf(buffer, access);
  }
  void deregister(transport::RegionId region) override { below_->deregister(region); }
  transport::RemoteRegion remote(transport::RegionId region) const override { return below_->remote(region); }
  std::uint64_t refused() const override { return below_->refused(); }
  Result<> send(transport::EndpointId endpoint, BytesView message) override {
    last_sent_to = endpoint;
    MessageHeader header{};
    if (BytesView rest = message; take(rest, header)) ++messages[header.kind];
    return below_->send(endpoint, message);
  }
  Result<> write(transport::EndpointId endpoint, std::span<const transport::Write> writes) override {
    transfers_ += writes.size();
    for (const auto& write : writes) {
      const std::uint64_t now = ++in_flight[{endpoint, write.context}];
      if (write.notify && Tag::unpack(*write.notify).kind != Tag::kReduceScatter)
        most_gathered = std::max(most_gathered, now);
    }
    return below_->write(endpoint, writes);
  }
  Result<> read(transport::EndpointId endpoint, std::span<const transport::Read> reads) override {
    transfers_ += reads.size();
    return below_->read(endpoint, reads);
  }
  std::optional<transport::ViewableRegion> viewable(transport::RegionId region) const override {
    auto where = below_->viewable(region);
    if (where && misplace_views) where->address = 4096;
    return where;
  }
  Result<BytesView> view(transport::EndpointId endpoint, const transport::ViewableRegion& where, std::uint64_t offset,
                         std::span<std::byte> room) override {
    ++views;
    return below_->view(endpoint, where, offset, room);
  }
  std::span<const transport::Event> poll() override {
    const auto events = below_->poll();
    for (const auto& event : events)
      if (event.kind == transport::EventKind::completed) --in_flight[{event.endpoint, event.value}];
    return events;
  }
  bool arm() override { return below_->arm(); }
  int event_fd() const override { return below_->event_fd(); }
  void close(transport::EndpointId endpoint) override { below_->close(endpoint); }

 private:
  std::unique_ptr<transport::Engine> below_;
  std::uint64_t& transfers_;
};

}  // namespace rejoin::ftar
