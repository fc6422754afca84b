#include "device/cuda_driver.h"

#include <dlfcn.h>

#include "base/fail.h"

namespace rejoin::device::cuda {

Result<> Driver::check(Status status, const char* what) const {
  if (status == kSuccess) return {};
  const char* text = nullptr;
  if (error_string(status, &text) != kSuccess || text == nullptr) text = "an error that the driver has no words for";
  return fail(status == 2 ? ErrorCode::exhausted : ErrorCode::io, "{}: CUDA error {}: {}", what, status, text);
}

Result<std::shared_ptr<const Driver>> load_driver(const std::string& name) {
  void* opened = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // for good: its threads run to the program's end
  if (opened == nullptr)
    return fail(ErrorCode::unavailable,
                "no CUDA driver on this machine ({}): install NVIDIA's, or use host memory where the program can",
                ::dlerror());
  auto driver = std::make_shared<Driver>();
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(opened, symbol));
    if (function == nullptr) missing += std::string(missing.empty() ? "" : ", ") + symbol;
  };
  find(driver->init, "cuInit");
  find(driver->error_string, "cuGetErrorString");
  find(driver->device_count, "cuDeviceGetCount");
  find(driver->device_get, "cuDeviceGet");
  find(driver->device_by_pci, "cuDeviceGetByPCIBusId");
  find(driver->device_name, "cuDeviceGetName");
  find(driver->device_pci, "cuDeviceGetPCIBusId");
  find(driver->device_attribute, "cuDeviceGetAttribute");
  find(driver->retain_context, "cuDevicePrimaryCtxRetain");
  find(driver->release_context, "cuDevicePrimaryCtxRelease_v2");
  find(driver->push_context, "cuCtxPushCurrent_v2");
  find(driver->pop_context, "cuCtxPopCurrent_v2");
  find(driver->synchronize_context, "cuCtxSynchronize");
  find(driver->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver->allocate, "cuMemAlloc_v2");
  find(driver->free, "cuMemFree_v2");
  find(driver->allocate_host, "cuMemHostAlloc");
  find(driver->free_host, "cuMemFreeHost");
  find(driver->register_host, "cuMemHostRegister_v2");
  find(driver->unregister_host, "cuMemHostUnregister");
  find(driver->device_pointer, "cuMemHostGetDevicePointer_v2");
  find(driver->copy, "cuMemcpyAsync");
  find(driver->clear, "cuMemsetD8Async");
  find(driver->granularity, "cuMemGetAllocationGranularity");
  find(driver->create, "cuMemCreate");
  find(driver->release, "cuMemRelease");
  find(driver->reserve, "cuMemAddressReserve");
  find(driver->unreserve, "cuMemAddressFree");
  find(driver->map, "cuMemMap");
  find(driver->unmap, "cuMemUnmap");
  find(driver->set_access, "cuMemSetAccess");
  find(driver->retain_handle, "cuMemRetainAllocationHandle");
  find(driver->address_range, "cuMemGetAddressRange_v2");
  find(driver->pointer_attribute, "cuPointerGetAttribute");
  find(driver->stream_wait_event, "cuStreamWaitEvent");
  find(driver->stream_create, "cuStreamCreateWithPriority");
  find(driver->stream_destroy, "cuStreamDestroy_v2");
  find(driver->stream_query, "cuStreamQuery");
  find(driver->stream_is_capturing, "cuStreamIsCapturing");
  find(driver->stream_synchronize, "cuStreamSynchronize");
  find(driver->launch_host, "cuLaunchHostFunc");
  find(driver->event_create, "cuEventCreate");
  find(driver->event_destroy, "cuEventDestroy_v2");
  find(driver->event_record, "cuEventRecord");
  find(driver->event_query, "cuEventQuery");
  find(driver->stream_wait_value, "cuStreamWaitValue64_v2");
  find(driver->stream_write_value, "cuStreamWriteValue64_v2");
  find(driver->flush_remote_writes, "cuFlushGPUDirectRDMAWrites");
  find(driver->module_load, "cuModuleLoadData");
  find(driver->module_unload, "cuModuleUnload");
  find(driver->module_function, "cuModuleGetFunction");
  find(driver->launch, "cuLaunchKernel");
  find(driver->range_handle, "cuMemGetHandleForAddressRange");
  if (!missing.empty())
    return fail(ErrorCode::unavailable, "the CUDA driver {} is too old (11.7 is the oldest that serves): it lacks {}",
                name, missing);
  return driver;
}

}  // namespace rejoin::device::cuda
