// "host:port" settings as asio endpoints.
#pragma once

#include <asio.hpp>
#include <chrono>
#include <string>

#include "base/result.h"

namespace rejoin::daemon {

Result<asio::ip::tcp::endpoint> endpoint_of(const std::string& text);
// Listens there; returns the address in use (the port where the system chose it). The error has the system's message.
Result<std::string> listen_on(asio::ip::tcp::acceptor& acceptor, const std::string& where);

// After an attempt to accept somebody: whether there was no descriptor, or no memory for a socket. The kernel keeps who
// waits, and would say so at once, for ever: it is to be tried again after a while, by when one may have become free.
bool without_descriptors(const asio::error_code& error);
constexpr auto kWithoutDescriptors = std::chrono::milliseconds(100);

// Whether who connects to `where` finds who listens at `listening` on this machine, as listen_on() has returned it.
bool leads_to(const std::string& where, const std::string& listening);

}  // namespace rejoin::daemon
