// The ABIs that NCCL looks for, as thin adapters of net.h.
#include <cstring>

#include "nccl/net.h"
#include "nccl/plugin.h"

namespace rejoin::nccl {
namespace {

using abi::Result;  // NCCL's, here; ours is rejoin::Result

struct Context {  // of a communicator
  int traffic_class = -1;
};

Plugin& plugin = *new Plugin;
struct Unloads {
  ~Unloads() { plugin.unload(); }
} unloads;

// The same call, in no child of fork().
template <auto Call, typename... Args>
Result not_in_child(Args... args) {
  return plugin.in_child() ? plugin.refuse_child() : Call(args...);
}

// ---- what all versions share

Result listen(int device, int traffic_class, void* handle, void** listener) {
  auto engine = plugin.engine(device, traffic_class);
  if (!engine) return plugin.complain(engine.error());
  Handle made;
  auto listening = (*engine)->listen(made);
  if (!listening) return plugin.complain(listening.error());
  std::memset(handle, 0, abi::kHandleBytes);
  std::memcpy(handle, &made, sizeof made);
  *listener = listening->release();
  return abi::kSuccess;
}

// The handle is NCCL's, and may lie anywhere; it is given in each call until the connection is there.
Result connect(int device, int traffic_class, void* handle, void** sender) {
  *sender = nullptr;
  auto engine = plugin.engine(device, traffic_class);
  if (!engine) return plugin.complain(engine.error());
  Handle copy;
  std::memcpy(&copy, handle, sizeof copy);
  auto connection = (*engine)->connect(copy);
  std::memcpy(handle, &copy, sizeof copy);
  if (!connection) return plugin.complain(connection.error());
  *sender = connection->release();
  return abi::kSuccess;
}

Result accept(void* listener, void** receiver, void**) {
  auto& listening = *static_cast<Listener*>(listener);
  auto connection = listening.device->accept(listening);
  if (!connection) return plugin.complain(connection.error());
  *receiver = connection->release();
  return abi::kSuccess;
}

Result keep(void* connection, void* data, std::size_t size, int kind, const transport::DmaBuf* dma_buf, void** handle) {
  if (size == 0 || (kind != abi::kHost && kind != abi::kCuda)) return abi::kInvalidArgument;
  const auto& its = *static_cast<Connection*>(connection);
  const auto use = its.sends ? Device::Use::send : Device::Use::receive;
  auto region = its.device->add_region(use, {static_cast<std::byte*>(data), size}, kind == abi::kCuda, dma_buf);
  if (!region) return plugin.complain(region.error());
  *handle = *region;
  return abi::kSuccess;
}
Result register_memory(void* connection, void* data, std::size_t size, int kind, void** handle) {
  return keep(connection, data, size, kind, nullptr, handle);
}
Result register_dma_buf(void* connection, void* data, std::size_t size, int kind, std::uint64_t offset, int fd,
                        void** handle) {
  const transport::DmaBuf buffer{.fd = fd, .offset = offset, .memory = {static_cast<std::byte*>(data), size}};
  return keep(connection, data, size, kind, &buffer, handle);
}
Result deregister(void* connection, void* handle) {
  if (plugin.in_child()) return abi::kSuccess;
  static_cast<Connection*>(connection)->device->remove_region(static_cast<Region*>(handle));
  return abi::kSuccess;
}

bool inside(const Region& region, const void* data, std::size_t size) {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= region.memory.data() && begin + size <= region.memory.data() + region.memory.size();
}

// With a null request: nothing can be done now, or there is nothing to do.
Result give(const rejoin::Result<Request*>& made, void** request) {
  *request = nullptr;
  if (!made) return plugin.complain(made.error());
  *request = *made;
  return abi::kSuccess;
}

Result send(void* sender, void* data, std::size_t size, int tag, void* handle, void*, void** request) {
  auto& connection = *static_cast<Connection*>(sender);
  const auto& region = *static_cast<Region*>(handle);
  if (!inside(region, data, size)) return abi::kInvalidArgument;
  return give(connection.device->send(connection, {static_cast<std::byte*>(data), size}, tag, region), request);
}

Result with_targets(int count, void** data, const auto* sizes, const int* tags, void** handles, const auto& then) {
  if (count < 1 || count > kMaxGroup) return abi::kInvalidArgument;
  std::array<Device::Target, kMaxGroup> targets;
  for (int i = 0; i < count; ++i) {
    const auto* region = static_cast<Region*>(handles[i]);
    const auto size = static_cast<std::size_t>(sizes[i]);
    if (!inside(*region, data[i], size)) return abi::kInvalidArgument;
    targets[i] = {{static_cast<std::byte*>(data[i]), size}, tags == nullptr ? 0 : tags[i], region};
  }
  return then(std::span<const Device::Target>(targets).first(static_cast<std::size_t>(count)));
}

template <typename Size>
Result receive_without(void* receiver, int count, void** data, Size* sizes, int* tags, void** handles, void** request) {
  auto& connection = *static_cast<Connection*>(receiver);
  return with_targets(count, data, sizes, tags, handles,
                      [&](auto targets) { return give(connection.device->receive(connection, targets), request); });
}
Result receive(void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles, void**,
               void** request) {
  return receive_without(receiver, count, data, sizes, tags, handles, request);
}

Result flush(void* receiver, int count, void** data, int* sizes, void** handles, void** request) {
  auto& connection = *static_cast<Connection*>(receiver);
  return with_targets(count, data, sizes, nullptr, handles,
                      [&](auto targets) { return give(connection.device->flush(connection, targets), request); });
}

Result test(void* request, int* done, int* sizes) {
  auto& asked = *static_cast<Request*>(request);
  *done = 0;
  auto finished = asked.connection->device->test(asked, sizes);
  if (!finished) return plugin.complain(finished.error());
  *done = *finished ? 1 : 0;
  return abi::kSuccess;
}

// In a child of fork() it stays its parent's.
template <typename What>
Result close(void* what) {
  if (plugin.in_child()) return abi::kSuccess;
  const std::unique_ptr<What> closed(static_cast<What*>(what));
  const auto device = closed->device;  // it may be the last
  device->close(*closed);
  return abi::kSuccess;
}

Result devices(int* count) { return plugin.devices(count); }
template <typename Properties>
Result properties(int device, Properties* to) {
  return plugin.properties(device, to);
}
template <typename Parts>
Result make_virtual(int* device, Parts* parts) {
  return plugin.make_virtual(device, parts);
}

// ---- what differs

Result init_8(abi::Logger logger) { return plugin.init(logger); }
Result init_10(abi::Logger logger, abi::Profiler) { return plugin.init(logger); }
Result init_11(void** context, std::uint64_t, abi::Config* config, abi::Logger logger, abi::Profiler) {
  const Result begun = plugin.init(logger);
  if (begun == abi::kSuccess) *context = new Context{config == nullptr ? -1 : config->traffic_class};
  return begun;
}
Result finalize(void* context) {
  delete static_cast<Context*>(context);
  plugin.finalize();
  return abi::kSuccess;
}
int class_of(void* context) { return context == nullptr ? -1 : static_cast<Context*>(context)->traffic_class; }

Result listen_8(int device, void* handle, void** listener) { return listen(device, -1, handle, listener); }
Result connect_8(int device, void* handle, void** sender, void**) { return connect(device, -1, handle, sender); }
Result connect_10(int device, abi::Config* config, void* handle, void** sender, void**) {
  return connect(device, config == nullptr ? -1 : config->traffic_class, handle, sender);
}
Result listen_11(void* context, int device, void* handle, void** listener) {
  return listen(device, class_of(context), handle, listener);
}
Result connect_11(void* context, int device, void* handle, void** sender, void**) {
  return connect(device, class_of(context), handle, sender);
}

Result send_8(void* sender, void* data, int size, int tag, void* handle, void** request) {
  if (size < 0) return abi::kInvalidArgument;
  return send(sender, data, static_cast<std::size_t>(size), tag, handle, nullptr, request);
}
Result send_9(void* sender, void* data, std::size_t size, int tag, void* handle, void** request) {
  return send(sender, data, size, tag, handle, nullptr, request);
}
Result set_attributes(void*, void*) { return abi::kSuccess; }  // hints of what is to come; nothing here depends on it

constexpr const char* kName = "Rejoin";

template <typename Net>
constexpr Net common(Net net) {
  net.name = kName;
  net.devices = not_in_child<devices>;
  net.accept = not_in_child<accept>;
  net.register_memory = not_in_child<register_memory>;
  net.register_dma_buf = not_in_child<register_dma_buf>;
  net.deregister = deregister;
  net.flush = not_in_child<flush>;
  net.test = not_in_child<test>;
  net.close_sender = net.close_receiver = close<Connection>;
  net.close_listener = close<Listener>;
  return net;
}
template <typename Properties, typename Parts>
constexpr abi::NetWithContext<Properties, Parts> with_context() {
  return common(abi::NetWithContext<Properties, Parts>{.init = init_11,
                                                       .properties = not_in_child<properties<Properties>>,
                                                       .listen = not_in_child<listen_11>,
                                                       .connect = not_in_child<connect_11>,
                                                       .send = not_in_child<send>,
                                                       .receive = not_in_child<receive>,
                                                       .make_virtual = not_in_child<make_virtual<Parts>>,
                                                       .finalize = finalize,
                                                       .set_attributes = set_attributes});
}

}  // namespace
}  // namespace rejoin::nccl

// The symbols that NCCL looks for, newest first.
#define REJOIN_EXPORT __attribute__((visibility("default")))
namespace nccl = rejoin::nccl;
extern "C" {
REJOIN_EXPORT nccl::abi::NetV12 ncclNetPlugin_v12 =
    nccl::with_context<nccl::abi::PropertiesV12, nccl::abi::VirtualV12>();
REJOIN_EXPORT nccl::abi::NetV11 ncclNetPlugin_v11 =
    nccl::with_context<nccl::abi::PropertiesV11, nccl::abi::VirtualV9>();
REJOIN_EXPORT nccl::abi::NetV10 ncclNetPlugin_v10 =
    nccl::common(nccl::abi::NetV10{.init = nccl::init_10,
                                   .properties = nccl::not_in_child<nccl::properties<nccl::abi::PropertiesV9>>,
                                   .listen = nccl::not_in_child<nccl::listen_8>,
                                   .connect = nccl::not_in_child<nccl::connect_10>,
                                   .send = nccl::not_in_child<nccl::send>,
                                   .receive = nccl::not_in_child<nccl::receive>,
                                   .make_virtual = nccl::not_in_child<nccl::make_virtual<nccl::abi::VirtualV9>>});
REJOIN_EXPORT nccl::abi::NetV9 ncclNetPlugin_v9 =
    nccl::common(nccl::abi::NetV9{.init = nccl::init_8,
                                  .properties = nccl::not_in_child<nccl::properties<nccl::abi::PropertiesV9>>,
                                  .listen = nccl::not_in_child<nccl::listen_8>,
                                  .connect = nccl::not_in_child<nccl::connect_8>,
                                  .send = nccl::not_in_child<nccl::send_9>,
                                  .receive = nccl::not_in_child<nccl::receive_without<std::size_t>>,
                                  .make_virtual = nccl::not_in_child<nccl::make_virtual<nccl::abi::VirtualV9>>});
REJOIN_EXPORT nccl::abi::NetV8 ncclNetPlugin_v8 =
    nccl::common(nccl::abi::NetV8{.init = nccl::init_8,
                                  .properties = nccl::not_in_child<nccl::properties<nccl::abi::PropertiesV8>>,
                                  .listen = nccl::not_in_child<nccl::listen_8>,
                                  .connect = nccl::not_in_child<nccl::connect_8>,
                                  .send = nccl::not_in_child<nccl::send_8>,
                                  .receive = nccl::not_in_child<nccl::receive_without<int>>});
}
