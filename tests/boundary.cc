// A program of somebody else's, linked with librejoin.so: what it throws passes through the library, and classes that
// the public headers declare are one and the same on both sides.
#include <cxxabi.h>

#include <cstdio>
#include <stdexcept>

#include "rejoin/checkpoint_transfer.h"
#include "transport/factory.h"

struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

int main() {
  // Before anything else is opened, and with something to say: of whether the kernel encrypts.
  if (!rejoin::transport::make_engine("tcp+aes;ktls=1")) return std::puts("no engine"), 1;
  const auto server = rejoin::CheckpointServer::open({.transport = "tcp", .listen = "127.0.0.1:0", .advertise = ""});
  if (!server) return std::puts(server.error().message.c_str()), 1;
  const auto interrupted = []() -> bool { throw Interrupted("the user has had enough"); };
  bool caught = false;
  try {
    (void)rejoin::CheckpointFetch::open("tcp", (*server)->address(), 1, std::chrono::seconds(60), interrupted);
  } catch (const Interrupted&) {
    caught = true;
  }
  if (!caught) return std::puts("an exception did not come back through the library"), 1;

  const auto engine = rejoin::transport::make_engine("tcp");
  if (!engine) return std::puts(engine.error().message.c_str()), 1;
  const auto& hidden = **engine;
  const auto* derived = dynamic_cast<const abi::__si_class_type_info*>(&typeid(hidden));
  if (derived == nullptr || derived->__base_type != &typeid(rejoin::transport::Engine))
    return std::puts("the library has a class transport::Engine of its own"), 1;
  std::puts("one class on both sides");
  return 0;
}
