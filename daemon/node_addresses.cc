// Where the node's catch-up stream and its trainers are, for other nodes, and whose streams can't reach it.
#include "base/bytes.h"
#include "base/fail.h"
#include "base/log.h"
#include "daemon/node_server.h"
#include "transport/advertise.h"

namespace rejoin::daemon {

// Where peers find us is where the coordinator does, as far as we can tell.
const std::string& NodeServer::own_host() {
  if (!own_host_) own_host_ = transport::own_host_towards(split(options_.coordinator, ',').front());
  return *own_host_;
}

Result<std::string> NodeServer::advertised(const std::string& stream) {
  auto address = transport::advertised({stream}, options_.advertise);
  if (!address) return tl::unexpected(address.error());
  return transport::listens_everywhere(*address) ? transport::with_host_for_any(*address, own_host()).text
                                                 : address->text;
}

// One that listens everywhere and was given no --advertise of its own is where its daemon is.
std::string NodeServer::advertised_of_trainer(const std::string& address) {
  if (!transport::listens_everywhere({address})) return address;
  const bool one = !options_.advertise.empty() && options_.advertise.find(',') == std::string::npos;
  return transport::with_host_for_any({address}, one ? options_.advertise : own_host()).text;
}

void NodeServer::warn_of(const StrangeStream& stream) {
  constexpr std::size_t most = 1024;  // as many replicas as a job can have
  if (warned_of_.size() >= most) warned_of_.clear();
  if (!warned_of_.insert(stream).second) return;
  spdlog::warn(
      "the catch-up stream of replica {}'s daemon goes over {}, and this node's over {}: neither replica can catch up "
      "from the other. Start all daemons of a job with the same --transport",
      stream.replica, stream.family, family_);
}

}  // namespace rejoin::daemon
