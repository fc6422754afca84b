// Where something listens, and the address that peers are given for it. 0.0.0.0 and :: are for listening; nobody can be
// reached at them.
#pragma once

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
// Where it listens on 0.0.0.0 or ::, that host is replaced by this one.
Address with_host_for_any(const Address& listening, const std::string& host);
bool listens_everywhere(const Address& listening);  // on one rail at least

// This machine's own address on the way to `peer` ("host:port"). Where that way does not leave the machine, or there is
// none, its address on the way to anywhere else; then that of an interface that is up; then the loopback's.
std::string own_host_towards(const std::string& peer);

}  // namespace rejoin::transport
