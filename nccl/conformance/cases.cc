// What NCCL does with a net plugin, and what it must be able to rely on.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <random>

#include "nccl/conformance/side.h"

namespace rejoin::nccl::conformance {

namespace {

constexpr std::byte kUntouched{0xee};

std::byte pattern(std::uint64_t seed, std::size_t i) {
  return static_cast<std::byte>((i * 131 + i / 253) * 7 + seed * 31);
}

void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(seed, i);
}

// The first `size` bytes are those of the seed, and all behind them is as it was.
void check(std::span<const std::byte> bytes, std::size_t size, std::uint64_t seed, const char* what) {
  for (std::size_t i = 0; i < size; ++i)
    expect(bytes[i] == pattern(seed, i), "{}: byte {} of {} is wrong", what, i, size);
  for (std::size_t i = size; i < bytes.size(); ++i)
    expect(bytes[i] == kUntouched, "{}: byte {} behind a message of {} has changed", what, i, size);
}

void sizes_of_every_kind(Side& side) {
  Connected link(side);
  for (const std::size_t size : {0ul, 1ul, 7ul, 8ul, 4095ul, 4096ul, 65537ul, 1048579ul, 16777216ul}) {
    Bytes out(std::max<std::size_t>(size, 1)), in(size + 64, kUntouched);
    fill(out, size + static_cast<std::size_t>(side.number));
    const Registered from(side, link.sender, out), to(side, link.receiver, in);
    // The receive is larger than what is sent.
    void* received = side.receive(link.receiver, {in}, {5}, {to.handle});
    void* sent = side.send(link.sender, std::span(out).first(size), 5, from.handle);
    const auto told = side.wait(received);
    (void)side.wait(sent);
    expect(told[0] == static_cast<int>(size), "test() tells of {} bytes where {} were sent", told[0], size);
    check(in, size, size + static_cast<std::size_t>(1 - side.number), "a message");
    void* data = in.data();
    int bytes = static_cast<int>(in.size());
    void* handle = to.handle;
    void* flushed = nullptr;
    side.call(side.net->flush(link.receiver, 1, &data, &bytes, &handle, &flushed), "iflush");
    if (flushed != nullptr) (void)side.wait(flushed);
    side.meet();
  }
}

void all_requests_in_flight(Side& side) {
  Connected link(side);
  constexpr std::size_t largest = 70000;
  constexpr int rounds = 20, most = abi::kMaxRequests;
  std::vector<Bytes> out(most, Bytes(largest)), in(most, Bytes(largest + 8));
  Bytes all(most * (largest + 8));
  std::vector<std::unique_ptr<Registered>> from, to;
  for (int i = 0; i < most; ++i) {
    from.push_back(std::make_unique<Registered>(side, link.sender, out[i]));
    to.push_back(std::make_unique<Registered>(side, link.receiver, in[i]));
  }
  std::mt19937 random(7);  // the same on both sides
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::size_t> sizes;
    std::vector<void*> sends, receives;
    for (int i = 0; i < most; ++i) sizes.push_back(random() % (largest + 1));
    for (int i = 0; i < most; ++i) {
      std::fill(in[i].begin(), in[i].end(), kUntouched);
      receives.push_back(side.receive(link.receiver, {in[i]}, {0}, {to[i]->handle}));
    }
    for (int i = 0; i < most; ++i) {
      fill(std::span(out[i]).first(sizes[i]), static_cast<std::uint64_t>(round * 100 + i));
      sends.push_back(side.send(link.sender, std::span(out[i]).first(sizes[i]), 0, from[i]->handle));
    }
    // In any order: here the last first.
    for (int i = most - 1; i >= 0; --i) {
      expect(side.wait(receives[i])[0] == static_cast<int>(sizes[i]), "message {} does not match receive {}", i, i);
      check(in[i], sizes[i], static_cast<std::uint64_t>(round * 100 + i), "one of many");
    }
    for (void* sent : sends) (void)side.wait(sent);
  }
  side.meet();
}

void groups(Side& side) {
  const int most = side.properties.max_receives;
  Connected link(side);
  constexpr std::size_t size = 5000;
  const auto count = static_cast<std::size_t>(most);
  Bytes out(count * size), in(count * size);
  const Registered from(side, link.sender, out), to(side, link.receiver, in);
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const std::size_t n = 1 + random() % count;
    std::fill(in.begin(), in.end(), kUntouched);
    std::vector<std::span<std::byte>> into;
    std::vector<int> tags;
    std::vector<std::size_t> sizes, order;
    for (std::size_t i = 0; i < n; ++i) {
      into.push_back(std::span(in).subspan(i * size, size));
      tags.push_back(static_cast<int>(100 + (i * 7 + static_cast<std::size_t>(round)) % 50));
      sizes.push_back(random() % (size + 1));
      order.push_back(i);
    }
    std::shuffle(order.begin(), order.end(), random);
    void* received = side.receive(link.receiver, into, tags, std::vector<void*>(n, to.handle));
    std::vector<void*> sends;
    for (const auto i : order) {
      const auto message = std::span(out).subspan(i * size, sizes[i]);
      fill(message, static_cast<std::uint64_t>(round) * 10 + i);
      sends.push_back(side.send(link.sender, message, tags[i], from.handle));
    }
    const auto told = side.wait(received, static_cast<int>(n));
    for (std::size_t i = 0; i < n; ++i) {
      expect(told[i] == static_cast<int>(sizes[i]), "receive {} of a group of {} got {} bytes, not {}", i, n, told[i],
             sizes[i]);
      check(into[i], sizes[i], static_cast<std::uint64_t>(round) * 10 + i, "one of a group");
    }
    for (void* sent : sends) (void)side.wait(sent);
  }
  side.meet();
}

// Who sends comes long before who receives, and must be told so at once.
void sends_before_receives(Side& side) {
  Connected link(side);
  Bytes bytes(100000, kUntouched);
  const Registered registered(side, side.number == 0 ? link.sender : link.receiver, bytes);
  if (side.number == 0) {
    fill(bytes, 3);
    void* request = nullptr;
    for (int i = 0; i < 100; ++i)
      side.call(side.net->send(link.sender, bytes.data(), bytes.size(), 1, registered.handle, &request), "isend");
    side.meet();
    if (request == nullptr) request = side.send(link.sender, bytes, 1, registered.handle);
    (void)side.wait(request);
  } else {
    side.meet();
    (void)side.wait(side.receive(link.receiver, {bytes}, {1}, {registered.handle}));
    check(bytes, bytes.size(), 3, "a message");
  }
  side.meet();
}

void registrations(Side& side) {
  Connected link(side);
  Bytes bytes(1 << 20);
  for (int round = 0; round < 50; ++round) {
    const Registered all(side, link.sender, bytes);
    const Registered part(side, link.sender, std::span(bytes).subspan(1000, 5000));
    const Registered same(side, link.receiver, std::span(bytes).subspan(3, 77777));
  }
  // A part of what is registered is sent, with the handle of the whole.
  Bytes in(3000, kUntouched);
  fill(std::span(bytes).subspan(777, 3000), 9);
  const Registered from(side, link.sender, bytes), to(side, link.receiver, in);
  void* received = side.receive(link.receiver, {in}, {0}, {to.handle});
  void* sent = side.send(link.sender, std::span(bytes).subspan(777, 3000), 0, from.handle);
  (void)side.wait(received);
  (void)side.wait(sent);
  check(in, 3000, 9, "a part");
  side.meet();
}

void many_connections(Side& side) {
  std::deque<Connected> links;
  for (int i = 0; i < 64; ++i) links.emplace_back(side);
  Bytes out(64 * 64), in(64 * 64, kUntouched);
  for (std::size_t i = 0; i < links.size(); ++i) {
    const auto message = std::span(out).subspan(i * 64, 64), there = std::span(in).subspan(i * 64, 64);
    fill(message, i);
    const Registered from(side, links[i].sender, message), to(side, links[i].receiver, there);
    void* received = side.receive(links[i].receiver, {there}, {0}, {to.handle});
    void* sent = side.send(links[i].sender, message, 0, from.handle);
    (void)side.wait(received);
    (void)side.wait(sent);
    check(there, 64, i, "over one of many connections");
  }
  side.meet();
  links.clear();
  for (int i = 0; i < 30; ++i) {
    const Connected one(side);
    side.meet();
  }
}

// One side closes with requests under way; nothing may land afterwards, and the plugin goes on.
void closed_in_flight(Side& side) {
  for (int round = 0; round < 5; ++round) {
    Connected link(side);
    constexpr std::size_t size = 4 << 20;
    std::vector<Bytes> memory(6, Bytes(size, kUntouched));
    {
      std::vector<std::unique_ptr<Registered>> registered;
      void* connection = side.number == 0 ? link.sender : link.receiver;
      for (auto& one : memory) registered.push_back(std::make_unique<Registered>(side, connection, one));
      if (side.number == 1)
        for (std::size_t i = 0; i < memory.size(); ++i)
          (void)side.receive(link.receiver, {memory[i]}, {0}, {registered[i]->handle});
      if (side.number == 0)
        for (std::size_t i = 0; i < 4; ++i) (void)side.send(link.sender, memory[i], 0, registered[i]->handle);
      side.meet();
      // NCCL withdraws its memory first and closes then; both with requests under way.
      registered.clear();
      side.close(link);
    }
    const auto then = memory;
    side.meet();
    expect(memory == then, "bytes landed after the connection was closed");
  }
  registrations(side);
}

// A receiver that has its messages may go at once, before the sender has heard that they are there: they were sent.
void closed_when_received(Side& side) {
  for (int round = 0; round < 40; ++round) {
    const std::size_t size = std::array<std::size_t, 4>{0, 1, 4096, 3 << 20}[static_cast<std::size_t>(round % 4)];
    Connected link(side);
    Bytes bytes(std::max<std::size_t>(size, 1), kUntouched);
    auto registered = std::make_unique<Registered>(side, side.number == 0 ? link.sender : link.receiver, bytes);
    const auto message = std::span(bytes).first(size);
    if (side.number == 0) {
      fill(message, size);
      (void)side.wait(side.send(link.sender, message, 0, registered->handle));
    } else {
      (void)side.wait(side.receive(link.receiver, {message}, {0}, {registered->handle}));
      check(bytes, size, size, "a message before the end");
      registered.reset();
      side.close(link);
    }
    side.meet();
  }
}

// More than the receive takes is cut to it, as by NCCL's own networks, and not a byte lands behind it.
void too_large(Side& side) {
  Connected link(side);
  Bytes bytes(5000, kUntouched);
  const Registered registered(side, side.number == 0 ? link.sender : link.receiver, bytes);
  constexpr std::size_t room = 1000;
  if (side.number == 0) {
    fill(bytes, 11);
    expect(side.wait(side.send(link.sender, bytes, 0, registered.handle))[0] == room, "isend does not tell its size");
  } else {
    void* received = side.receive(link.receiver, {std::span(bytes).first(room)}, {0}, {registered.handle});
    expect(side.wait(received)[0] == room, "a receive that is filled does not tell its size");
    check(bytes, room, 11, "a message that was cut");
  }
  side.meet();
}

void a_peer_that_dies(Side& side) {
  Connected link(side);
  constexpr std::size_t size = 8 << 20;
  Bytes out(size), in(size);
  const Registered from(side, link.sender, out), to(side, link.receiver, in);
  void* received = side.receive(link.receiver, {in}, {0}, {to.handle});
  if (side.number == 1) {
    void* sent = side.send(link.sender, std::span(out).first(1000), 0, from.handle);
    (void)side.wait(sent);
    ::kill(::getpid(), SIGKILL);
  }
  (void)side.wait(received);
  received = side.receive(link.receiver, {in}, {0}, {to.handle});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (int done = 0; side.net->test(received, &done, nullptr) == abi::kSuccess;) {
    expect(done == 0, "a receive from a dead peer is done");
    expect(std::chrono::steady_clock::now() < deadline, "{} s after its peer's death a receive still waits",
           kPatience.count());
  }
  void* sent = nullptr;
  while (side.net->send(link.sender, out.data(), out.size(), 0, from.handle, &sent) == abi::kSuccess) {
    if (sent != nullptr) break;  // its receive was granted before; the request fails
    expect(std::chrono::steady_clock::now() < deadline, "isend to a dead peer waits for ever");
  }
  for (int done = 0; sent != nullptr && side.net->test(sent, &done, nullptr) == abi::kSuccess;)
    expect(std::chrono::steady_clock::now() < deadline, "a send to a dead peer waits for ever");
}

}  // namespace

std::vector<Case> cases() {
  return {{"messages of every size, into larger receives, flushed", sizes_of_every_kind},
          {"32 requests in flight, both ways, tested in any order", all_requests_in_flight},
          {"grouped receives, sent to by tag in any order", groups},
          {"sends before their receives", sends_before_receives},
          {"registrations that overlap, and parts of them", registrations},
          {"64 connections at once, 30 one after the other", many_connections},
          {"closed with requests in flight", closed_in_flight},
          {"closed when the messages are there", closed_when_received},
          {"a message larger than its receive", too_large},
          {"a peer that dies", a_peer_that_dies, true}};
}

std::uint64_t stream(Side& side, std::chrono::seconds duration) {
  Connected link(side);
  constexpr std::size_t size = 1 << 20, depth = 8;
  std::vector<Bytes> out(depth, Bytes(size)), in(depth, Bytes(size));
  std::vector<std::unique_ptr<Registered>> from, to;
  for (std::size_t i = 0; i < depth; ++i) {
    from.push_back(std::make_unique<Registered>(side, link.sender, out[i]));
    to.push_back(std::make_unique<Registered>(side, link.receiver, in[i]));
  }
  // Side 0 ends it, with a message of one byte.
  const auto end = std::chrono::steady_clock::now() + duration;
  std::uint64_t bytes = 0;
  for (std::uint64_t round = 0, going = 1; going != 0; ++round) {
    if (side.number == 0) going = std::chrono::steady_clock::now() < end ? 1 : 0;
    std::vector<void*> sends, receives;
    for (std::size_t i = 0; i < depth; ++i) {
      std::fill(in[i].begin(), in[i].end(), kUntouched);
      receives.push_back(side.receive(link.receiver, {in[i]}, {0}, {to[i]->handle}));
    }
    const std::size_t length = going != 0 || side.number == 1 ? size : 1;
    for (std::size_t i = 0; i < depth; ++i) {
      fill(std::span(out[i]).first(length), round * depth + i);
      sends.push_back(side.send(link.sender, std::span(out[i]).first(length), 0, from[i]->handle));
    }
    for (std::size_t i = 0; i < depth; ++i) {
      const auto came = static_cast<std::size_t>(side.wait(receives[i])[0]);
      check(in[i], came, round * depth + i, "of the stream");
      bytes += came;
      if (side.number == 1) going = came == 1 ? 0 : 1;
    }
    for (void* sent : sends) (void)side.wait(sent);
  }
  side.meet();
  return bytes;
}

Measured measure(Side& side) {
  Connected link(side);
  Measured measured;
  constexpr std::size_t size = 1 << 20, depth = 8, messages = 2000;
  Bytes bytes(size * depth);
  void* connection = side.number == 0 ? link.sender : link.receiver;
  auto registered = std::make_unique<Registered>(side, connection, bytes);
  side.meet();
  auto began = std::chrono::steady_clock::now();
  std::deque<void*> requests;
  for (std::size_t i = 0; i < messages; ++i) {
    const auto message = std::span(bytes).subspan(i % depth * size, size);
    if (requests.size() == depth) (void)side.wait(requests.front()), requests.pop_front();
    requests.push_back(side.number == 0 ? side.send(link.sender, message, 0, registered->handle)
                                        : side.receive(link.receiver, {message}, {0}, {registered->handle}));
  }
  for (void* request : requests) (void)side.wait(request);
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  measured.gigabytes_per_second = static_cast<double>(messages * size) / took.count() / 1e9;
  registered.reset();
  side.meet();
  constexpr int turns = 2000;
  Bytes small(16);
  const Registered from(side, link.sender, small), to(side, link.receiver, small);
  void* received = side.receive(link.receiver, {std::span(small).subspan(8)}, {0}, {to.handle});
  side.meet();
  began = std::chrono::steady_clock::now();
  for (int turn = 0; turn < turns; ++turn) {
    if (side.number == 0) (void)side.wait(side.send(link.sender, std::span(small).first(8), 0, from.handle));
    (void)side.wait(received);
    if (turn + 1 < turns) received = side.receive(link.receiver, {std::span(small).subspan(8)}, {0}, {to.handle});
    if (side.number == 1) (void)side.wait(side.send(link.sender, std::span(small).first(8), 0, from.handle));
  }
  took = std::chrono::steady_clock::now() - began;
  measured.microseconds = took.count() / turns / 2 * 1e6;
  side.meet();
  return measured;
}

}  // namespace rejoin::nccl::conformance
