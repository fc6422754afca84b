// Where something listens, and the address that peers are given for it. 0.0.0.0 and :: are for listening; nobody can be
// reached at them.
#pragma once

#include <optional>

#include "transport/transport.h"

namespace rejoin::transport {

// Engine::listen() at the address of this setting, by whose name errors begin: "--data-listen: can't listen …".
Result<Address> listen_as(Engine& engine, const Address& where, const std::string& setting);

// The form of an --advertise setting: a host, or a host for each rail ("10.0.0.1,10.1.0.1"), without ports.
Result<> check_advertised(const std::string& hosts);

// `listening` is what listen() has returned, of one rail or of several. Its hosts are replaced by these: by one for all
// rails, or by one for each; its ports stay. Addresses that have no host (of shm and UCX) stay as they are, and so does
// everything where `hosts` is empty. Errors: `invalid_argument`, both numbers named.
Result<Address> advertised(const Address& listening, const std::string& hosts);

// This machine's own addresses as others may know them, of either family; empty where it has none. Neither those of the
// loopback nor link-local ones: nobody else can use them.
struct OwnHosts {
  std::string v4, v6;
  bool v6_first = false;  // where either will do
  bool operator==(const OwnHosts&) const = default;
};
// `here`: this end of a connection with another machine ("host:port"), from which that one can be reached as well. Of
// the other family, or without such an end: the address on the default route, then that of an interface that is up.
OwnHosts own_hosts(const std::string& here = {});
// As for a connection with `peer`, which is not made. Of a name nobody asks a name server: it counts as none.
OwnHosts own_hosts_towards(const std::string& peer);
// Where a family has none: for what concerns this machine alone. What listens over both goes by an address of others'.
OwnHosts or_loopback(OwnHosts hosts);
// What listens on 0.0.0.0 is there over IPv4 alone, and what listens on :: over both: that host is replaced by one of
// these where there is one, and stays otherwise.
Address with_own_host_for_any(const Address& listening, const OwnHosts& hosts);
// Where it listens on 0.0.0.0 or ::, that host is replaced by this one.
Address with_host_for_any(const Address& listening, const std::string& host);
bool listens_everywhere(const Address& listening);  // on one rail at least
bool is_loopback(const Address& address);           // likewise; of a name nobody knows
bool is_link_local(const Address& address);         // … of IPv6

// The one that this machine would connect to `peer` from, where that is another machine.
std::optional<std::string> own_host_towards(const std::string& peer);

}  // namespace rejoin::transport
