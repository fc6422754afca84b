#include "collectives/call.h"

#include "base/fail.h"

namespace rejoin::collectives {

namespace {

using Buffers = std::vector<std::span<std::byte>>;

Result<> check_count(const Call& call, std::string_view what, const Buffers& buffers, std::size_t wanted) {
  if (buffers.size() == wanted) return {};
  return fail(ErrorCode::invalid_argument, "{} takes {} {} buffers here, and {} were given", to_string(call.kind),
              wanted, what, buffers.size());
}

// All are as long as the first of them.
Result<> check_same(const Call& call, const Buffers& buffers, std::uint64_t size) {
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].size() != size)
      return fail(ErrorCode::invalid_argument, "{} takes buffers of one size, and buffer {} has {} bytes, not {}",
                  to_string(call.kind), i, buffers[i].size(), size);
  return {};
}

std::vector<std::uint64_t> sizes_of(const Buffers& buffers) {
  std::vector<std::uint64_t> sizes;
  for (const auto& buffer : buffers) sizes.push_back(buffer.size());
  return sizes;
}

struct Counts {
  std::size_t inputs = 0, outputs = 0;
};

Counts counts_of(Collective kind, bool root, std::size_t members) {
  switch (kind) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::broadcast:
    case Collective::send:
    case Collective::receive: return {1, 0};
    case Collective::all_gather: return {1, members};
    case Collective::reduce_scatter: return {members, 1};
    case Collective::gather: return {1, root ? members : 0};
    case Collective::scatter: return {root ? members : 0, 1};
    case Collective::all_to_all: return {members, members};
    case Collective::barrier: return {0, 0};
  }
  return {};
}

}  // namespace

Result<Operation> prepare(const Call& call, std::uint32_t rank, std::uint32_t members) {
  const bool between_two = call.kind == Collective::send || call.kind == Collective::receive;
  const bool has_root = call.kind == Collective::reduce || call.kind == Collective::broadcast ||
                        call.kind == Collective::gather || call.kind == Collective::scatter;
  const bool adds = combines(call.kind);
  if ((has_root || between_two) && (call.root >= members || (between_two && call.root == rank)))
    return fail(ErrorCode::invalid_argument, "{} names rank {}: in this group are {} members, and this one is rank {}",
                to_string(call.kind), call.root, members, rank);
  if (adds && is_bitwise(call.combine) && !is_integer(call.type))
    return fail(ErrorCode::invalid_argument, "a {} is one of integers' bits, and {} is no type of integers",
                to_string(call.combine), to_string(call.type));
  for (const auto* buffers : {&call.inputs, &call.outputs})
    for (std::size_t i = 0; i < buffers->size(); ++i)
      if ((*buffers)[i].data() == nullptr && !(*buffers)[i].empty())
        return fail(ErrorCode::invalid_argument, "{} {} of {} has {} bytes at the address 0: give it memory",
                    buffers == &call.inputs ? "input" : "output", i, to_string(call.kind), (*buffers)[i].size());
  const auto wanted = counts_of(call.kind, call.root == rank, members);
  if (auto checked = check_count(call, "input", call.inputs, wanted.inputs); !checked)
    return tl::unexpected(checked.error());
  if (auto checked = check_count(call, "output", call.outputs, wanted.outputs); !checked)
    return tl::unexpected(checked.error());

  Operation operation;
  operation.tag = between_two ? call.tag : 0;
  operation.memory = call.inputs;
  operation.memory.insert(operation.memory.end(), call.outputs.begin(), call.outputs.end());
  const bool uneven = call.kind == Collective::all_gather || call.kind == Collective::all_to_all;
  const auto bytes = operation.memory.empty() ? 0 : operation.memory.front().size();
  if (!uneven)
    if (auto checked = check_same(call, operation.memory, bytes); !checked) return tl::unexpected(checked.error());
  const auto element = adds ? size_of(call.type) : 1;
  if (bytes % element != 0)
    return fail(ErrorCode::invalid_argument, "{} bytes are no whole number of {} elements", bytes,
                to_string(call.type));

  operation.signature = {.bytes = bytes, .root = has_root || between_two ? call.root : 0, .kind = call.kind};
  if (adds) operation.signature.type = call.type, operation.signature.combine = call.combine;
  operation.signature.memory = call.memory;
  if (call.memory == transport::MemoryKind::cuda) {
    operation.exported.resize(operation.memory.size());
    if (adds && call.combine != Combine::sum && call.combine != Combine::mean)
      return fail(ErrorCode::invalid_argument,
                  "a {} is not taken in a GPU's memory, where there are sums and means: give it the host's",
                  to_string(call.combine));
    for (const auto memory : operation.memory)
      if (adds && reinterpret_cast<std::uintptr_t>(memory.data()) % element != 0)
        return fail(ErrorCode::invalid_argument, "a GPU's memory at {} is not where elements of {} can be added",
                    static_cast<const void*>(memory.data()), to_string(call.type));
  }
  const Shape shape{.members = members,
                    .rank = rank,
                    .root = call.root,
                    .bytes = bytes,
                    .element = static_cast<std::uint32_t>(element)};
  switch (call.kind) {
    case Collective::all_reduce: operation.plan = all_reduce(shape); break;
    case Collective::reduce: operation.plan = reduce(shape); break;
    case Collective::broadcast: operation.plan = broadcast(shape); break;
    case Collective::reduce_scatter: operation.plan = reduce_scatter(shape); break;
    case Collective::gather: operation.plan = gather(shape); break;
    case Collective::scatter: operation.plan = scatter(shape); break;
    case Collective::barrier: operation.plan = barrier(shape); break;
    case Collective::send: operation.plan = send(shape); break;
    case Collective::receive: operation.plan = receive(shape); break;
    case Collective::all_gather: {
      const auto sizes = sizes_of(call.outputs);
      if (bytes != sizes[rank])
        return fail(ErrorCode::invalid_argument, "all_gather takes {} bytes as input, and output {} has {}", bytes,
                    rank, sizes[rank]);
      operation.signature.bytes = 0;
      for (const auto size : sizes) operation.signature.bytes += size;
      operation.plan = all_gather(shape, sizes);
      break;
    }
    case Collective::all_to_all: {
      const auto sends = sizes_of(call.inputs), receives = sizes_of(call.outputs);
      if (sends[rank] != receives[rank])
        return fail(ErrorCode::invalid_argument, "all_to_all takes {} bytes for this rank, and output {} has {}",
                    sends[rank], rank, receives[rank]);
      operation.signature.bytes = 0;  // each pair has a size of its own
      operation.plan = all_to_all(shape, sends, receives);
      break;
    }
  }
  return operation;
}

}  // namespace rejoin::collectives
