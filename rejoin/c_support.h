// What the files behind c.h have alike: how an error and memory go out of C++.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/longest_time.h"
#include "base/no_cancel.h"
#include "base/result.h"
#include "base/text.h"
#include "rejoin/c.h"
#include "rejoin/listen_config.h"

namespace rejoin::c {

// Without a destructor: handlers of atexit() come after those of the thread's.
inline std::array<char, 2048>& last_error() {
  thread_local std::array<char, 2048> message{"nothing has failed"};
  return message;
}

inline rejoin_code failed(const Error& error) {
  const std::string text = cut(error.message, last_error().size() - 1);
  std::memcpy(last_error().data(), text.c_str(), text.size() + 1);
  return static_cast<rejoin_code>(static_cast<int>(error.code) + 1);
}

inline rejoin_code null_argument(const std::string& what) {
  return failed({ErrorCode::invalid_argument, what + " is null"});
}

template <typename T>
rejoin_code code(const Result<T>& result) {
  return result ? REJOIN_OK : failed(result.error());
}

// A thread of the caller's that is being cancelled may do it.
template <typename T>
void destroy(T* one) {
  const NoCancel no_cancel;
  delete one;
}

// Nothing is thrown through a caller that may not know of exceptions.
template <typename Call>
rejoin_code guarded(const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return failed({ErrorCode::exhausted, error.what()});
  }
}

inline std::span<std::byte> bytes_of(const rejoin_memory& memory) {
  return {static_cast<std::byte*>(memory.data), static_cast<std::size_t>(memory.bytes)};
}

inline std::vector<std::span<std::byte>> all_bytes_of(const rejoin_memory* memory, std::size_t count) {
  std::vector<std::span<std::byte>> all;
  for (std::size_t i = 0; i < count; ++i) all.push_back(bytes_of(memory[i]));
  return all;
}

// Null: the default.
inline ListenConfig listen_config(const char* transport, const char* listen, const char* advertise) {
  ListenConfig config;
  if (transport != nullptr) config.transport = transport;
  if (listen != nullptr) config.listen = listen;
  if (advertise != nullptr) config.advertise = advertise;
  return config;
}

inline std::function<bool()> asking(int (*cancelled)(void*), void* with) {
  if (cancelled == nullptr) return {};
  return [=] { return cancelled(with) != 0; };
}

inline std::chrono::milliseconds milliseconds_of(std::uint64_t ms) {
  return std::chrono::milliseconds(std::min(ms, kLongestTimeMs));
}

}  // namespace rejoin::c
