// One way to get an engine by its name, for configuration and flags.
#pragma once

#include <memory>
#include <string>

#include "transport/transport.h"

namespace rejoin::device {
class Device;
class Reducer;
}  // namespace rejoin::device

#pragma GCC visibility push(default)
namespace rejoin::transport {

// "shm": shared memory, inside one node. "tcp": between nodes without RDMA. "tcp:ADDRESS,ADDRESS…": TCP over several
// rails, each a local address; the peers must name as many. "tcp+aes", "tcp+aes:ADDRESS,…": the same, encrypted; with
// ";ktls=1" behind it by the kernel, towards peers who say so, too. With ";threads=N" N more threads move bulk beside
// the caller's, each over connections of its own. "ibverbs": RDMA over all active ports, "ibverbs:near" over those of
// them that are nearest to the GPU whose memory it is for; "ibverbs:DEVICE,…": over these, each with its settings.
// "ucx:LIST": UCX over the transports listed (UCX's names, comma-separated; they must handle peer failures, as its tcp
// and RDMA transports do). docs/transports.md has the settings, and what each transport needs.
Result<std::unique_ptr<Engine>> make_engine(const std::string& name);
// What peers must have alike to reach each other, as far as a name tells: "shm", "tcp over 2 rails".
std::string family_of(const std::string& name);
std::size_t rails_of(const std::string& name);  // that a list names, with those of threads
Result<> check_name(const std::string& name);   // its form alone, before anything is opened
// The same for memory of this device and the host's: where the transport can't reach the device's, it goes through
// pinned host memory. All peers must have such engines, or none.
Result<std::unique_ptr<Engine>> make_engine(const std::string& name, const std::shared_ptr<device::Device>& device,
                                            const std::shared_ptr<device::Reducer>& reducer = nullptr);

}  // namespace rejoin::transport

#pragma GCC visibility pop
