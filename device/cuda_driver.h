// The part of the CUDA driver's interface that is used here, as its ABI has it since CUDA 11.7, and its loading.
// Declared here so that building needs no toolkit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/result.h"
#include "device/stream_handle.h"

namespace rejoin::device::cuda {

using Status = int;  // CUresult
using DevicePointer = unsigned long long;
using Ordinal = int;
using Context = struct ContextTag*;
using StreamHandle = CudaStream;
using EventHandle = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

constexpr Status kSuccess = 0, kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventNoTiming = 2, kHostAllocPortable = 1, kHostRegisterPortable = 1;
constexpr unsigned kWaitGreaterOrEqual = 0;
constexpr int kAttributeRemoteWriteOrdering = 118;  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
constexpr int kOrderedForOwner = 100;               // … of which the device needs no flush
constexpr int kAttributeRemoteWriteFlushes = 117;   // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
constexpr int kFlushByHost = 1;
constexpr int kAttributeStreamFlags = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
constexpr int kAttributeComputeMode = 20;   // CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
constexpr int kExclusiveProcess = 3;
constexpr int kAttributeMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kCaptureRelaxed = 2;             // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kFlushCurrentContext = 0, kFlushToOwner = 100;
constexpr int kAttributeDmaBuf = 124;  // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int kRangeHandleDmaBuf = 1;  // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

// Of memory that is mapped by hand. CUmemLocation, CUmemAllocationProp, CUmemAccessDesc.
using Handle = unsigned long long;
constexpr int kPinnedAllocation = 1, kLocationDevice = 1, kReadWrite = 3, kLeastGranularity = 0;
struct Location {
  int type = kLocationDevice;
  int id = 0;
};
struct AllocationProperties {
  int type = kPinnedAllocation;
  int handle_types = 0;
  Location location;
  void* unused = nullptr;
  unsigned char compression = 0;
  unsigned char gpu_direct_rdma = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(AllocationProperties) == 32);
struct AccessDescription {
  Location location;
  int flags = kReadWrite;
};
constexpr int kPointerDevice = 9;            // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kAttributeRdmaOfMapped = 110;  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED

struct Driver {
  Status (*init)(unsigned flags);
  Status (*error_string)(Status, const char** text);
  Status (*device_count)(int* count);
  Status (*device_get)(Ordinal* device, int ordinal);
  Status (*device_by_pci)(Ordinal* device, const char* id);
  Status (*device_name)(char* name, int size, Ordinal);
  Status (*device_pci)(char* id, int size, Ordinal);
  Status (*device_attribute)(int* value, int attribute, Ordinal);
  Status (*retain_context)(Context*, Ordinal);
  Status (*release_context)(Ordinal);
  Status (*push_context)(Context);
  Status (*pop_context)(Context*);
  Status (*synchronize_context)();
  Status (*exchange_capture_mode)(int* mode);  // the calling thread's
  Status (*allocate)(DevicePointer*, std::size_t);
  Status (*free)(DevicePointer);
  Status (*allocate_host)(void**, std::size_t, unsigned flags);
  Status (*free_host)(void*);
  Status (*register_host)(void*, std::size_t, unsigned flags);
  Status (*unregister_host)(void*);
  Status (*device_pointer)(DevicePointer*, void*, unsigned flags);
  Status (*copy)(DevicePointer to, DevicePointer from, std::size_t, StreamHandle);
  Status (*clear)(DevicePointer, unsigned char value, std::size_t, StreamHandle);
  Status (*granularity)(std::size_t*, const AllocationProperties*, int option);
  Status (*create)(Handle*, std::size_t, const AllocationProperties*, unsigned long long flags);
  Status (*release)(Handle);
  Status (*reserve)(DevicePointer*, std::size_t, std::size_t alignment, DevicePointer wish, unsigned long long flags);
  Status (*unreserve)(DevicePointer, std::size_t);
  Status (*map)(DevicePointer, std::size_t, std::size_t offset, Handle, unsigned long long flags);
  Status (*unmap)(DevicePointer, std::size_t);
  Status (*set_access)(DevicePointer, std::size_t, const AccessDescription*, std::size_t count);
  Status (*retain_handle)(Handle*, void* address);
  Status (*address_range)(DevicePointer* base, std::size_t* size, DevicePointer);
  Status (*pointer_attribute)(void* value, int attribute, DevicePointer);
  Status (*stream_wait_event)(StreamHandle, EventHandle, unsigned flags);
  Status (*stream_create)(StreamHandle*, unsigned flags, int priority);
  Status (*stream_destroy)(StreamHandle);
  Status (*stream_query)(StreamHandle);
  Status (*stream_is_capturing)(StreamHandle, int* capturing);
  Status (*stream_synchronize)(StreamHandle);
  Status (*launch_host)(StreamHandle, void (*)(void*), void*);
  Status (*event_create)(EventHandle*, unsigned flags);
  Status (*event_destroy)(EventHandle);
  Status (*event_record)(EventHandle, StreamHandle);
  Status (*event_query)(EventHandle);
  Status (*stream_wait_value)(StreamHandle, DevicePointer, std::uint64_t value, unsigned flags);
  Status (*stream_write_value)(StreamHandle, DevicePointer, std::uint64_t value, unsigned flags);
  Status (*flush_remote_writes)(int target, int scope);
  Status (*module_load)(Module*, const void* image);
  Status (*module_unload)(Module);
  Status (*module_function)(Function*, Module, const char* name);
  Status (*launch)(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared_bytes, StreamHandle, void** arguments, void** extra);
  Status (*range_handle)(void* handle, DevicePointer, std::size_t, int type, unsigned long long flags);

  // "WHAT: the driver's words", where `status` is no success.
  Result<> check(Status status, const char* what) const;
};

// Errors: `unavailable` where the library or one of the functions is missing.
Result<std::shared_ptr<const Driver>> load_driver(const std::string& library);

}  // namespace rejoin::device::cuda
