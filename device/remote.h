// A GPU's memory as another process gets at it without a context of its own on that GPU: it asks the process that owns
// the memory, whose thread copies and digests on a stream of low priority, in its own context. So the two never share
// the GPU by turns, the driver has nobody to keep apart, and memory of any kind can be served, whoever allocated it.
//
// Requests and replies are datagrams over a pair of sockets, whose hang-up tells the end of either process. Copies go
// to and from memory that both have mapped and that the owner has pinned; when one is done, the GPU itself writes that
// there. Neither side trusts the other: a request outside the memory that is served ends the line.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "device/access.h"
#include "device/device.h"

namespace rejoin::device {

// ---- the process whose memory it is

// What the other process is served by: a socket, and memory. Each serves one process.
struct Line {
  Fd socket, memory;
};

class MemoryServer {
 public:
  // Serves this memory of the device, which outlives the server, in a thread that may stand in the driver for as long
  // as the driver likes: nothing here waits for it but the destructor. Errors: of the device.
  static Result<std::unique_ptr<MemoryServer>> make(std::shared_ptr<Device> device,
                                                    std::vector<std::span<std::byte>> memory);
  ~MemoryServer();  // no stream of the device may wait for a flag that only comes later

  // For the next process to be served; who had one before is served no longer. Any thread; calls no driver. Nothing: it
  // is still being made, or could not be, which the log says: again later.
  std::optional<Line> next();

  // Ends the line of whoever is served: when it returns true, nothing that was asked for over it is done any more, also
  // where the other end had shut it behind its requests. Any thread but the server's; false: the driver has not come to
  // the end of it for that long.
  bool end_served(Duration longest);

  // Unpins the memory by which processes were served that have gone, and returns how many these were. It enters the
  // driver, which waits for all streams and lets no other thread queue anything meanwhile: for a thread of whoever
  // queues work, where no stream waits for a flag that only comes later.
  std::size_t release_ended();

 private:
  struct Served;
  MemoryServer() = default;
  Result<std::unique_ptr<Served>> prepare() const;
  void run();
  Result<> answer(Served& served, BytesView message);
  bool is_served(std::uint64_t address, std::uint64_t size) const;
  bool changed();

  std::shared_ptr<Device> device_;
  std::vector<std::span<std::byte>> memory_;
  std::unique_ptr<Stream> copies_;
  std::unique_ptr<Access> access_;
  Fd wake_;
  std::mutex mutex_;  // guards what follows; never held in the driver
  std::vector<std::unique_ptr<Served>> next_;
  std::vector<std::unique_ptr<Served>> taken_;  // the last is to be served; those before it are at their end
  std::vector<std::unique_ptr<Served>> ended_;  // to be unpinned
  bool stop_ = false;
  std::uint64_t ends_wanted_ = 0, ends_done_ = 0;  // of end_served()
  std::condition_variable ended_one_;
  std::thread thread_;
};

// ---- the other

// The seam as far as a device can be had this way: pinned memory, streams that copy between it and the device's memory,
// digests. There are no kernels and no dma-bufs; the owner alone can export those. Thread: one at a time, but for
// disconnect().
class RemoteDevice : public Device {
 public:
  // Whatever waits for the server returns with an error, now and later. Any thread.
  virtual void disconnect() = 0;
};

// `address`: the device's, for people. Errors: `corrupt`, `refused` for memory that is not as it should be.
Result<std::shared_ptr<RemoteDevice>> connect_remote(Line line, const std::string& address);

}  // namespace rejoin::device
