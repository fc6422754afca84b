// What the backends' tables of endpoints have alike. An entry has `id`, `stage` (an enum with `open` and `failed`) and
// `failure`.
#pragma once

#include <span>

#include "base/fail.h"
#include "transport/regions.h"

namespace rejoin::transport {

template <typename Table>
auto* find_endpoint(Table& table, EndpointId id) {
  auto found = table.find(id.value);
  return found == table.end() ? nullptr : found->second.get();
}

// The endpoint, if operations can be posted on it now.
template <typename Table>
auto find_open_endpoint(Table& table, EndpointId id) -> Result<decltype(find_endpoint(table, id))> {
  auto* endpoint = find_endpoint(table, id);
  if (endpoint == nullptr) return fail(ErrorCode::not_found, "endpoint {:x} is closed", id.value);
  using Stage = decltype(endpoint->stage);
  if (endpoint->stage == Stage::failed)
    return fail(ErrorCode::unavailable, "endpoint {:x} has failed: {}", id.value, endpoint->failure);
  if (endpoint->stage != Stage::open)
    return fail(ErrorCode::unavailable, "endpoint {:x} is not connected yet", id.value);
  return endpoint;
}

inline Result<> check_message(BytesView message) {
  if (message.size() <= Engine::kMaxMessage) return {};
  return fail(ErrorCode::invalid_argument, "a message of {} bytes is over the limit of {}", message.size(),
              Engine::kMaxMessage);
}

inline Result<> check_hello(BytesView hello, std::size_t limit = Engine::kMaxHello) {
  if (hello.size() <= limit) return {};
  return fail(ErrorCode::invalid_argument, "a hello of {} bytes is over the limit of {}", hello.size(), limit);
}

// All local ranges of these writes or reads, or the first that is wrong: nothing is posted then.
template <typename Operation>
Result<> check_local_ranges(Regions& regions, std::span<const Operation> operations) {
  for (const auto& operation : operations)
    if (auto local = regions.local(operation.local, operation.length); !local) return tl::unexpected(local.error());
  return {};
}

// The endpoint, if all of these writes or reads can be posted on it now.
template <typename Table, typename Operation>
auto find_for_posting(Table& table, Regions& regions, EndpointId id, std::span<const Operation> operations) {
  auto endpoint = find_open_endpoint(table, id);
  if (endpoint)
    if (auto checked = check_local_ranges(regions, operations); !checked) endpoint = tl::unexpected(checked.error());
  return endpoint;
}

}  // namespace rejoin::transport
