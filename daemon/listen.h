// "host:port" settings as asio endpoints.
#pragma once

#include <asio.hpp>
#include <string>

#include "base/fd.h"
#include "base/result.h"

namespace rejoin::daemon {

Result<asio::ip::tcp::endpoint> endpoint_of(const std::string& text);
std::string text_of(const asio::ip::tcp::endpoint& endpoint);
// Listens there; returns the address in use (the port where the system chose it). The error has the system's message.
Result<std::string> listen_on(asio::ip::tcp::acceptor& acceptor, const std::string& where);

using rejoin::without_descriptors;
bool without_descriptors(const asio::error_code& error);  // of Asio's attempt

// Whether who connects to `where` finds who listens at `listening` on this machine, as listen_on() has returned it.
bool leads_to(const std::string& where, const std::string& listening);

}  // namespace rejoin::daemon
