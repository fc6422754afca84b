#include "nccl/conformance/side.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

namespace rejoin::nccl::conformance {

namespace {

template <typename Table>
void take_common(Net& net, const Table& table) {
  net.name = table.name == nullptr ? "" : table.name;
  net.devices = table.devices;
  net.accept = [&table](void* listener, void** receiver) {
    void* offload = nullptr;
    return table.accept(listener, receiver, &offload);
  };
  net.register_memory = table.register_memory;
  net.deregister = table.deregister;
  net.flush = table.flush;
  net.test = table.test;
  net.close_sender = table.close_sender;
  net.close_receiver = table.close_receiver;
  net.close_listener = table.close_listener;
  net.finalize = [] { return abi::kSuccess; };
}

template <typename Theirs>
void take_properties(Properties& to, const Theirs& from) {
  to = {.name = from.name == nullptr ? "" : from.name,
        .pci_path = from.pci_path == nullptr ? "" : from.pci_path,
        .pointers = from.pointers,
        .speed = from.speed,
        .port = from.port,
        .max_connections = from.max_connections,
        .max_receives = from.max_receives,
        .registration_is_global = from.registration_is_global != 0,
        .guid = from.guid};
  if constexpr (requires { from.parts; }) {
    to.parts = from.parts.count;
    to.largest = from.max_point_to_point;
  }
}

template <typename Theirs, typename Table>
auto properties_of(const Table& table) {
  return [&table](int device, Properties& to) {
    Theirs theirs{};
    const auto result = table.properties(device, &theirs);
    if (result == abi::kSuccess) take_properties(to, theirs);
    return result;
  };
}

template <typename Table>
void take_8_listening(Net& net, const Table& table) {
  net.listen = table.listen;
  net.connect = [&table](int device, void* handle, void** sender) {
    void* offload = nullptr;
    return table.connect(device, handle, sender, &offload);
  };
}

template <typename Table>
void take_10_sending(Net& net, const Table& table) {
  net.send = [&table](void* sender, void* data, std::size_t size, int tag, void* handle, void** request) {
    return table.send(sender, data, size, tag, handle, nullptr, request);
  };
  net.receive = [&table](void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles,
                         void** request) {
    std::vector<void*> profiles(static_cast<std::size_t>(count));
    return table.receive(receiver, count, data, sizes, tags, handles, profiles.data(), request);
  };
}

template <typename Theirs, typename Table>
void take_with_context(Net& net, const Table& table) {
  take_common(net, table);
  take_10_sending(net, table);
  auto context = std::make_shared<void*>(nullptr);
  net.init = [&table, context](abi::Logger logger) {
    abi::Config config{.traffic_class = -1};
    return table.init(context.get(), 0x1234, &config, logger, nullptr);
  };
  net.properties = properties_of<Theirs>(table);
  net.listen = [&table, context](int device, void* handle, void** listener) {
    return table.listen(*context, device, handle, listener);
  };
  net.connect = [&table, context](int device, void* handle, void** sender) {
    void* offload = nullptr;
    return table.connect(*context, device, handle, sender, &offload);
  };
  net.finalize = [&table, context] { return table.finalize(*context); };
}

}  // namespace

std::unique_ptr<Net> Net::find(void* library, int version) {
  void* symbol = ::dlsym(library, fmt::format("ncclNetPlugin_v{}", version).c_str());
  if (symbol == nullptr) return nullptr;
  auto net = std::make_unique<Net>();
  net->version = version;
  if (version == 12) take_with_context<abi::PropertiesV12>(*net, *static_cast<abi::NetV12*>(symbol));
  if (version == 11) take_with_context<abi::PropertiesV11>(*net, *static_cast<abi::NetV11*>(symbol));
  if (version == 10) {
    const auto& table = *static_cast<abi::NetV10*>(symbol);
    take_common(*net, table);
    take_10_sending(*net, table);
    net->init = [&table](abi::Logger logger) { return table.init(logger, nullptr); };
    net->properties = properties_of<abi::PropertiesV9>(table);
    net->listen = table.listen;
    net->connect = [&table](int device, void* handle, void** sender) {
      abi::Config config{.traffic_class = -1};
      void* offload = nullptr;
      return table.connect(device, &config, handle, sender, &offload);
    };
  }
  if (version == 9) {
    const auto& table = *static_cast<abi::NetV9*>(symbol);
    take_common(*net, table);
    take_8_listening(*net, table);
    net->init = table.init;
    net->properties = properties_of<abi::PropertiesV9>(table);
    net->send = table.send;
    net->receive = table.receive;
  }
  if (version == 8) {
    const auto& table = *static_cast<abi::NetV8*>(symbol);
    take_common(*net, table);
    take_8_listening(*net, table);
    net->init = table.init;
    net->properties = properties_of<abi::PropertiesV8>(table);
    net->send = [&table](void* sender, void* data, std::size_t size, int tag, void* handle, void** request) {
      return table.send(sender, data, static_cast<int>(size), tag, handle, request);
    };
    net->receive = [&table](void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles,
                            void** request) {
      std::vector<int> narrow(sizes, sizes + count);
      return table.receive(receiver, count, data, narrow.data(), tags, handles, request);
    };
  }
  return net;
}

// ---- the line

Bytes Side::exchange(BytesView mine) {
  const auto move = [&](void* bytes, std::size_t size, bool out) {
    auto* at = static_cast<char*>(bytes);
    while (size > 0) {
      pollfd ready{.fd = line_.get(), .events = static_cast<short>(out ? POLLOUT : POLLIN), .revents = 0};
      const auto patience = std::chrono::milliseconds(2 * kPatience).count();
      expect(::poll(&ready, 1, static_cast<int>(patience)) == 1, "the other side says nothing any more");
      const ssize_t moved = out ? ::write(line_.get(), at, size) : ::read(line_.get(), at, size);
      expect(moved > 0, "the other side is gone");
      at += moved;
      size -= static_cast<std::size_t>(moved);
    }
  };
  std::uint64_t size = mine.size();
  Bytes copy(mine.begin(), mine.end());
  move(&size, sizeof size, true);
  move(copy.data(), copy.size(), true);
  move(&size, sizeof size, false);
  Bytes theirs(size);
  move(theirs.data(), theirs.size(), false);
  return theirs;
}

// ---- as NCCL does it

void Side::call(abi::Result result, const char* what) {
  expect(result == abi::kSuccess, "{} gave {}", what, static_cast<int>(result));
}

Side::Link Side::open_link() {
  alignas(16) std::byte mine[abi::kHandleBytes] = {};
  void* listener = nullptr;
  call(net->listen(device, mine, &listener), "listen");
  expect(listener != nullptr, "listen gave no listener");
  Bytes theirs = exchange(mine);
  Link link;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (link.sender == nullptr || link.receiver == nullptr) {
    if (link.sender == nullptr) call(net->connect(device, theirs.data(), &link.sender), "connect");
    if (link.receiver == nullptr) call(net->accept(listener, &link.receiver), "accept");
    expect(std::chrono::steady_clock::now() < deadline, "no connection after {} s", kPatience.count());
  }
  call(net->close_listener(listener), "closeListen");
  return link;
}

void Side::close(Link& link) {
  if (link.sender != nullptr) call(net->close_sender(std::exchange(link.sender, nullptr)), "closeSend");
  if (link.receiver != nullptr) call(net->close_receiver(std::exchange(link.receiver, nullptr)), "closeRecv");
}

std::vector<int> Side::wait(void* request, int count) {
  std::vector<int> sizes(static_cast<std::size_t>(count));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (int done = 0; done == 0;) {
    call(net->test(request, &done, sizes.data()), "test");
    expect(done != 0 || std::chrono::steady_clock::now() < deadline, "a request is not done after {} s",
           kPatience.count());
  }
  return sizes;
}

void* Side::send(void* sender, std::span<std::byte> data, int tag, void* handle) {
  void* request = nullptr;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (request == nullptr) {
    call(net->send(sender, data.data(), data.size(), tag, handle, &request), "isend");
    expect(request != nullptr || std::chrono::steady_clock::now() < deadline, "isend takes nothing for {} s",
           kPatience.count());
  }
  return request;
}

void* Side::receive(void* receiver, std::vector<std::span<std::byte>> into, std::vector<int> tags,
                    std::vector<void*> handles) {
  std::vector<void*> data;
  std::vector<std::size_t> sizes;
  for (const auto& one : into) data.push_back(one.data()), sizes.push_back(one.size());
  void* request = nullptr;
  call(net->receive(receiver, static_cast<int>(into.size()), data.data(), sizes.data(), tags.data(), handles.data(),
                    &request),
       "irecv");
  expect(request != nullptr, "irecv takes nothing although fewer than {} are under way", abi::kMaxRequests);
  return request;
}

Registered::Registered(Side& side, void* connection, std::span<std::byte> memory)
    : side_(side), connection_(connection) {
  side.call(side.net->register_memory(connection, memory.data(), memory.size(), abi::kHost, &handle), "regMr");
}
Registered::~Registered() { (void)side_.net->deregister(connection_, handle); }

}  // namespace rejoin::nccl::conformance
