// The verbs backend does RDMA over InfiniBand or RoCE by rdma-core's libibverbs. One engine is one rail, which is one
// port of one device; transport/striped/ makes one engine of several.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace rejoin::transport::ibverbs {

struct Options {
  std::string device;                      // "mlx5_0" or "mlx5_0:2" (port 2)
  std::optional<std::uint32_t> gid_index;  // nothing: a GID of RoCE v2 with an IPv4 address, else of RoCE v2, else 0
  std::uint32_t queue_pairs = 2;           // per endpoint: 1 to 8
  std::uint32_t queue_depth = 128;         // outstanding work requests per queue pair: 16 to 4096
  std::uint32_t receive_buffers = 512;     // per engine, of 4 KiB each
  std::uint32_t mtu = 0;                   // bytes; 0: the active MTU of the port
  std::uint8_t service_level = 0;
  std::uint8_t traffic_class = 0;  // 106 is usual for lossless RoCE
  // The device sends a packet again after 4.096 µs × 2^timeout, `retries` times; then the endpoint fails. By the
  // defaults it gives up after about 2 s, on lossless and lossy fabrics.
  std::uint8_t timeout = 16, retries = 7;
  // Where both sides want it and both devices can, bulk goes over queue pairs that place data as it arrives (mlx5's
  // out-of-order data placement), so that adaptive routing helps. It has not been tried on hardware yet.
  bool out_of_order = false;
  // Others carry on where its port is down at the start, or its device not there: both are looked for again whenever a
  // connection is made.
  bool one_of_several = false;
  // With an address, or an empty text for the one that the device's GID stands for, rdma_cm connects the queue pairs
  // from there. With nothing the two sides exchange their data over TCP. The side that connects decides.
  std::optional<std::string> connection_manager;
};

// Says whether verbs can be used at all. Errors: `unavailable` where libibverbs is not there, with what to install.
Result<> available();

struct Ports {
  std::vector<std::string> names;     // of the devices' active ports, "DEVICE:PORT"
  std::vector<std::string> left_out;  // the others, and why
};
// None where verbs can't be used.
Ports find_ports();
std::vector<std::string> active_ports();

// Describes a port to whoever chooses among several.
struct PortInfo {
  std::string pci_path;    // the device's directory in /sys; empty: it is on no PCI bus
  std::uint64_t guid = 0;  // the device's
  std::uint32_t speed_mbps = 0;
  std::uint32_t port = 1;
  bool dma_buf = false;  // its driver takes dma-bufs
};
// `name` is one that active_ports() returns or a device's alone, with or without settings. Errors: as make_engine().
Result<PortInfo> describe_port(const std::string& name);

// Parses "DEVICE[:PORT]" with ';'-separated settings after it:
// gid=3;qps=4;depth=128;mtu=4096;sl=0;tc=106;timeout=16;retries=7;ooo=1;cm=auto
Result<Options> parse_options(const std::string& text);

// Opens the device. Errors: `not_found` (no such device), `unavailable` (port down, no permission), `invalid_argument`,
// `exhausted`.
Result<std::unique_ptr<Engine>> make_engine(const Options& options);

}  // namespace rejoin::transport::ibverbs
