// "host:port" settings as asio endpoints, and what the system may lack to hear of them.
#pragma once

#include <asio.hpp>
#include <memory>
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

// Tells what happens at a descriptor, which it takes. Errors: `exhausted`, where asio's constructors would throw.
using Watched = std::unique_ptr<asio::posix::stream_descriptor>;
Result<Watched> watch(asio::io_context& io, Fd descriptor);

// Whether who connects to `where` finds who listens at `listening` on this machine, as listen_on() has returned it.
bool leads_to(const std::string& where, const std::string& listening);

}  // namespace rejoin::daemon
