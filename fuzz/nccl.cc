// The NCCL plugin's connections: what a peer may put into a handle, say, and write.
#include <spdlog/spdlog.h>

#include <cstring>

#include "fuzz/input.h"
#include "nccl/net.h"
#include "transport/sim/fabric.h"

using namespace rejoin;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spdlog::set_level(spdlog::level::off);
  fuzz::Input input{data, size};
  VirtualClock clock;
  transport::sim::Fabric fabric({.seed = 1, .late_writes = true}, clock);
  auto peer = fabric.make_engine();
  auto device = *nccl::Device::make(fabric.make_engine(), "", clock);
  std::vector<std::byte> memory(256), theirs(256);
  const auto from = *peer->register_region(theirs, transport::MemoryKind::host, transport::Access::remote_write);
  transport::EndpointId at_peer;
  std::vector<nccl::Grant> granted;
  const auto go = [&] {
    for (int i = 0; i < 20 && fabric.step(); ++i)
      for (const auto& event : peer->poll()) {
        if (event.kind == transport::EventKind::accepted) at_peer = event.endpoint;
        if (event.kind == transport::EventKind::message)
          if (auto grant = nccl::parse_grant(event.message)) granted.push_back(*grant);
      }
  };
  nccl::Handle handle;
  std::unique_ptr<nccl::Listener> listener;
  std::unique_ptr<nccl::Connection> connection;
  const bool sends = input.next() % 2 == 0;
  if (sends) {
    handle.magic = nccl::kMagic;
    std::strcpy(handle.address, ("=" + peer->listen({""})->text).c_str());
    input.scribble(&handle, sizeof handle);
    for (int i = 0; i < 4 && !connection; ++i) {
      auto connected = device->connect(handle);
      if (!connected) break;
      connection = std::move(*connected);
      go();
    }
  } else {
    listener = *device->listen(handle);
    nccl::Hello hello{.listener = {handle.listener[0], handle.listener[1]}};
    input.scribble(&hello, sizeof hello);
    at_peer = *peer->connect({handle.address + 1}, bytes_of(hello));
    for (int i = 0; i < 4 && !connection; ++i) {
      go();
      (void)peer->send(at_peer, input.take(input.next() % 16));
      auto accepted = device->accept(*listener);
      if (!accepted) break;
      connection = std::move(*accepted);
    }
  }
  if (connection) {
    auto* region =
        *device->add_region(sends ? nccl::Device::Use::send : nccl::Device::Use::receive, memory, false, nullptr);
    std::vector<nccl::Request*> requests;
    std::uint64_t number = 0;
    while (input.size > 0) {
      switch (input.next() % 6) {
        case 0: (void)peer->send(at_peer, input.take(input.next())); break;
        case 1: {  // a grant that is nearly right
          Bytes message = joined(number++, bytes_of(std::uint64_t{1}));
          nccl::Grant::Buffer place{.region = peer->remote(from), .size = 128, .tag = input.next() % 4};
          const auto bytes = bytes_of(place);
          message.insert(message.end(), bytes.begin(), bytes.end());
          input.scribble(message.data(), message.size());
          (void)peer->send(at_peer, message);
          break;
        }
        case 2: {  // into what was granted, with any notification
          std::uint64_t notification = 0;
          input.scribble(&notification, sizeof notification);
          if (granted.empty()) break;
          const auto& place = granted[input.next() % granted.size()].buffers[0];
          const transport::Write write{.context = 1,
                                       .local = {from, 0},
                                       .remote = {place.region, place.offset},
                                       .length = input.next() % 16u,
                                       .notify = notification};
          (void)peer->write(at_peer, {&write, 1});
          break;
        }
        case 3: {
          const nccl::Device::Target targets[] = {{std::span(memory).first(64), input.next() % 4, region},
                                                  {std::span(memory).subspan(64, 64), 9, region}};
          auto request =
              sends ? device->send(*connection, std::span(memory).first(input.next()), input.next() % 4, *region)
                    : device->receive(*connection, std::span(targets).first(1 + input.next() % 2));
          if (request && *request != nullptr) requests.push_back(*request);
          break;
        }
        case 4: {
          if (requests.empty()) break;
          int sizes[nccl::kMaxGroup];
          auto done = device->test(*requests.back(), sizes);
          if (!done || *done) requests.pop_back();
          break;
        }
        case 5: go(); break;
      }
    }
    go();
    device->close(*connection);
    device->remove_region(region);
  }
  connection.reset();
  if (listener) device->close(*listener);
  listener.reset();
  return 0;
}
