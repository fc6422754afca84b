// NCCL's net plugin interface, versions 8 to 12 (NCCL 2.20 to 2.30), as its binary layout is published. Only what a net
// plugin and its user need; names follow NCCL's without their prefix.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rejoin::nccl::abi {

enum Result : int {
  kSuccess = 0,
  kCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
};

constexpr std::size_t kHandleBytes = 128;
constexpr int kMaxRequests = 32;  // a connection's, under way at once; times the grouped receives for those who send
constexpr int kHost = 1, kCuda = 2, kDmaBuf = 4;  // kinds of pointers
constexpr int kDeviceOfHost = 0;                  // no offload to the GPU
constexpr std::int16_t kUndefined = -1;

enum LogLevel : int { kLogWarn = 2, kLogInfo = 3 };
constexpr unsigned long kLogNet = 16;
using Logger = void (*)(LogLevel level, unsigned long flags, const char* file, int line, const char* format, ...);
using Profiler = Result (*)(void** handle, int type, void* parent, std::int64_t plugin, void* extra);

template <int kMost>
struct Virtual {  // devices that are used as one
  int count;
  int devices[kMost];
};
using VirtualV9 = Virtual<4>;
using VirtualV12 = Virtual<8>;

struct Config {
  int traffic_class;  // -1: not set
};

struct PropertiesV8 {
  char* name;
  char* pci_path;  // in /sys; null: none
  std::uint64_t guid;
  int pointers;
  int registration_is_global;
  int speed;  // Mb/s
  int port;
  float latency;  // µs
  int max_connections, max_receives;
  int offload, offload_version;
};

template <typename Parts>
struct PropertiesFrom9 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int pointers;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int max_connections, max_receives;
  int offload, offload_version;
  Parts parts;
  std::size_t max_point_to_point, max_collective;  // bytes of one message
};
using PropertiesV9 = PropertiesFrom9<VirtualV9>;  // and 10
struct PropertiesV11 : PropertiesV9 {
  int max_multi_request;
};
struct PropertiesV12 : PropertiesFrom9<VirtualV12> {
  int max_multi_request;
  std::int16_t rail, plane;
};

// What has not changed since version 8.
using Devices = Result (*)(int* count);
using Accept = Result (*)(void* listener, void** receiver, void** offload);
using Register = Result (*)(void* connection, void* data, std::size_t size, int kind, void** handle);
using RegisterDmaBuf = Result (*)(void* connection, void* data, std::size_t size, int kind, std::uint64_t offset,
                                  int fd, void** handle);
using Deregister = Result (*)(void* connection, void* handle);
using Flush = Result (*)(void* receiver, int count, void** data, int* sizes, void** handles, void** request);
using Test = Result (*)(void* request, int* done, int* sizes);
using Close = Result (*)(void* connection);
using DeviceHandle = Result (*)(void* connection, void* handle, void** device_handle);
using Consumed = Result (*)(void* receiver, int count, void* request);
// … since 9, 10 and 11.
using Send = Result (*)(void* sender, void* data, std::size_t size, int tag, void* handle, void* profile,
                        void** request);
using Receive = Result (*)(void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles,
                           void** profiles, void** request);
using Listen = Result (*)(void* context, int device, void* handle, void** listener);
using Connect = Result (*)(void* context, int device, void* handle, void** sender, void** offload);
using Init = Result (*)(void** context, std::uint64_t communicator, Config* config, Logger logger, Profiler profiler);
using Finalize = Result (*)(void* context);

struct NetV8 {
  const char* name;
  Result (*init)(Logger logger);
  Devices devices;
  Result (*properties)(int device, PropertiesV8* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** sender, void** offload);
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Result (*send)(void* sender, void* data, int size, int tag, void* handle, void** request);
  Result (*receive)(void* receiver, int count, void** data, int* sizes, int* tags, void** handles, void** request);
  Flush flush;
  Test test;
  Close close_sender, close_receiver, close_listener;
  DeviceHandle device_handle;
  Consumed consumed;
};

struct NetV9 {
  const char* name;
  Result (*init)(Logger logger);
  Devices devices;
  Result (*properties)(int device, PropertiesV9* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** sender, void** offload);
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Result (*send)(void* sender, void* data, std::size_t size, int tag, void* handle, void** request);
  Result (*receive)(void* receiver, int count, void** data, std::size_t* sizes, int* tags, void** handles,
                    void** request);
  Flush flush;
  Test test;
  Close close_sender, close_receiver, close_listener;
  DeviceHandle device_handle;
  Consumed consumed;
  Result (*make_virtual)(int* device, VirtualV9* parts);
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger logger, Profiler profiler);
  Devices devices;
  Result (*properties)(int device, PropertiesV9* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, Config* config, void* handle, void** sender, void** offload);
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Send send;
  Receive receive;
  Flush flush;
  Test test;
  Close close_sender, close_receiver, close_listener;
  DeviceHandle device_handle;
  Consumed consumed;
  Result (*make_virtual)(int* device, VirtualV9* parts);
};

template <typename Properties, typename Parts>
struct NetWithContext {
  const char* name;
  Init init;
  Devices devices;
  Result (*properties)(int device, Properties* properties);
  Listen listen;
  Connect connect;
  Accept accept;
  Register register_memory;
  RegisterDmaBuf register_dma_buf;
  Deregister deregister;
  Send send;
  Receive receive;
  Flush flush;
  Test test;
  Close close_sender, close_receiver, close_listener;
  DeviceHandle device_handle;
  Consumed consumed;
  Result (*make_virtual)(int* device, Parts* parts);
  Finalize finalize;
  Result (*set_attributes)(void* context, void* attributes);
};
using NetV11 = NetWithContext<PropertiesV11, VirtualV9>;
using NetV12 = NetWithContext<PropertiesV12, VirtualV12>;

static_assert(sizeof(PropertiesV8) == 64 && sizeof(PropertiesV9) == 104 && sizeof(PropertiesV11) == 112 &&
              sizeof(PropertiesV12) == 128);

}  // namespace rejoin::nccl::abi
