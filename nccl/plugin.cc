#include "nccl/plugin.h"

#include <cxxabi.h>
#include <semaphore.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include "base/children.h"
#include "base/fail.h"
#include "base/log.h"
#include "transport/factory.h"

namespace rejoin::nccl {

namespace {

// Our log, as part of NCCL's.
class NcclSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit NcclSink(abi::Logger logger) : logger_(logger) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    const std::string text(message.payload.data(), message.payload.size());
    logger_(message.level >= spdlog::level::warn ? abi::kLogWarn : abi::kLogInfo, abi::kLogNet, __FILE__, __LINE__,
            "NET/Rejoin : %s", text.c_str());
  }
  void flush_() override {}
  abi::Logger logger_;
};

// Static objects are destroyed when this library is unloaded and when the program ends, and only in the first case may
// connections end with them: in the second NCCL's threads are still at work. A handler of the program's, rather than
// this library's, runs in the second alone, and before them. It outlives this library, so that it is a function of the
// C library's, on a page that is never given back.
class ProgramEnds {
 public:
  void watch() {
    if (ends_ != nullptr) return;
    void* page = ::mmap(nullptr, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return;
    ends_ = static_cast<sem_t*>(page);
    ::sem_init(ends_, 0, 0);
    const auto post = reinterpret_cast<void (*)(void*)>(reinterpret_cast<void (*)()>(::sem_post));
    (void)::abi::__cxa_atexit(post, ends_, nullptr);
  }
  bool here() const {
    int posted = 0;
    return ends_ != nullptr && ::sem_getvalue(ends_, &posted) == 0 && posted > 0;
  }

 private:
  sem_t* ends_ = nullptr;
} program_ends;

}  // namespace

Plugin::Plugin() { (void)spdlog::default_logger(); }  // so that spdlog's own globals outlive this one

void Plugin::unload() {
  set_logger(nullptr);  // the library goes: its sink must not be called again
  if (program_ends.here()) return;
  if (!in_child())
    for (const auto& device : made()) device->end();
  delete this;
}

abi::Result Plugin::init(abi::Logger logger) {
  if (in_child()) return refuse_child();
  std::scoped_lock lock(mutex_);
  program_ends.watch();
  if (logs_ == nullptr && logger != nullptr) {
    logs_ = logger;
    set_logger(std::make_shared<spdlog::logger>("rejoin", std::make_shared<NcclSink>(logger)));
  }
  if (devices_.empty()) {
    warn_of_unknown_settings();
    settings_ = settings_from_environment();
    auto found = find_devices(settings_);
    if (!found) return complain(found.error());
    for (auto& info : *found) {
      rejoin::logger().info("device {}: {}, {} Mb/s{}{}", devices_.size(), info.name, info.speed_mbps,
                            info.dma_buf ? ", GPU memory by dma-buf" : "",
                            info.cuda ? ", GPU memory by nvidia-peermem" : "");
      devices_.push_back(std::make_unique<DeviceInfo>(std::move(info)));
    }
  }
  ++begun_;
  return abi::kSuccess;
}

void Plugin::finalize() {
  if (in_child()) return;
  {
    std::scoped_lock lock(mutex_);
    if (begun_ > 0 && --begun_ > 0) return;
  }
  const bool last_of_all = program_ends.here();  // unload() has been called, and NCCL may yet unload this library
  for (const auto& device : made()) last_of_all ? device->end() : device->give_up_all();
}

abi::Result Plugin::devices(int* count) {
  std::scoped_lock lock(mutex_);
  *count = static_cast<int>(devices_.size());
  return abi::kSuccess;
}

rejoin::Result<int> Plugin::join(const std::vector<int>& parts) {
  std::scoped_lock lock(mutex_);
  std::vector<DeviceInfo> all;
  for (const auto& info : devices_) all.push_back(*info);
  auto joined = join_devices(all, parts);
  if (!joined) return tl::unexpected(joined.error());
  const int number = static_cast<int>(devices_.size());
  logger().info("device {}: {} as rails", number, joined->name);
  devices_.push_back(std::make_unique<DeviceInfo>(std::move(*joined)));
  return number;
}

rejoin::Result<std::shared_ptr<Device>> Plugin::engine(int device, int traffic_class) {
  const DeviceInfo* info = find(device);
  if (info == nullptr) return fail(ErrorCode::invalid_argument, "no device {}", device);
  std::scoped_lock lock(mutex_);
  auto& known = engines_[{device, traffic_class}];
  if (auto there = known.lock()) return there;
  std::string transport = info->transport;
  if (traffic_class >= 0 && traffic_class <= 255 && transport.starts_with("ibverbs:")) {
    std::string with;
    for (const auto& rail : split(transport.substr(8), ','))
      with += fmt::format("{}{};tc={}", with.empty() ? "" : ",", rail, traffic_class);
    transport = "ibverbs:" + with;
  }
  auto address = local_address(settings_);
  if (!address) return tl::unexpected(address.error());
  generation_ = children::generation();
  auto opened = transport::make_engine(transport).and_then(
      [&](auto&& made) { return Device::make(std::move(made), *address, clock_, family_of(transport)); });
  if (!opened) return tl::unexpected(of_device(device, info->name, opened.error()));
  known = *opened;
  return opened;
}

bool Plugin::in_child() const { return generation_ >= 0 && generation_ != children::generation(); }

// Through nothing that has a lock, which another thread of the parent may have held.
abi::Result Plugin::refuse_child() {
  if (const abi::Logger log = logs_)
    log(abi::kLogWarn, abi::kLogNet, __FILE__, __LINE__,
        "NET/Rejoin : this is a child of fork(), which has no part in its parent's connections: start a process of "
        "its own for what uses NCCL, as by exec or Python's 'spawn'");
  return abi::kInvalidUsage;
}

abi::Result Plugin::complain(const Error& error) {
  logger().warn("{}", error.message);
  switch (error.code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::mismatch: return abi::kInvalidUsage;
    case ErrorCode::unavailable:
    case ErrorCode::refused:
    case ErrorCode::cancelled:
    case ErrorCode::corrupt:
    case ErrorCode::timeout: return abi::kRemoteError;
    default: return abi::kSystemError;
  }
}

const DeviceInfo* Plugin::find(int device) {
  std::scoped_lock lock(mutex_);
  return device >= 0 && static_cast<std::size_t>(device) < devices_.size() ? devices_[device].get() : nullptr;
}

std::vector<std::shared_ptr<Device>> Plugin::made() {
  std::scoped_lock lock(mutex_);
  std::vector<std::shared_ptr<Device>> all;
  for (const auto& [which, engine] : engines_)
    if (auto there = engine.lock()) all.push_back(std::move(there));
  return all;
}

}  // namespace rejoin::nccl
