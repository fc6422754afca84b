// Hears from the kernel's connection manager when a device is about to be removed. The verbs' own event for it comes
// only from drivers that can be parted from their users; the others wait until everyone has closed the device, and this
// is how everyone learns of it. It speaks to /dev/infiniband/rdma_cm itself, because librdmacm keeps the device open.
#pragma once

#include <optional>
#include <string>

#include "base/fd.h"

namespace rejoin::transport::ibverbs {

class RemovalWatch {
 public:
  // `address`: an IPv4 address of the device's port. Nothing where the connection manager is not to be had; nothing
  // else needs it.
  static std::optional<RemovalWatch> start(const std::string& address);
  int fd() const { return manager_.get(); }
  bool removed();  // asks; never blocks

 private:
  explicit RemovalWatch(Fd manager) : manager_(std::move(manager)) {}
  Fd manager_;
};

}  // namespace rejoin::transport::ibverbs
