// Element types and operations of all-reduces, and the collective operations of a process group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#pragma GCC visibility push(default)
namespace rejoin {

enum class DataType : std::uint8_t { float32, float64, bfloat16, float16, int32, int64 };
inline constexpr DataType kDataTypes[] = {DataType::float32, DataType::float64, DataType::bfloat16,
                                          DataType::float16, DataType::int32,   DataType::int64};

// Sum: 16-bit types are added in float32 and rounded (to nearest even) once a hop. Mean: the sum, multiplied by the
// reciprocal of the number of contributors (a double for float64, else a float) before the last rounding; for integers,
// divided towards zero.
enum class ReduceOp : std::uint8_t { sum, mean };

// What a process group's members do together (rejoin/process_group.h), or two of them.
enum class Collective : std::uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  barrier,
  send,
  receive
};

// How a process group makes one element of two. Sum as above, and in a GPU's memory a mean, too; in the host's memory
// that is the rounded sum, divided by the number of members. A maximum or minimum with a NaN is a NaN; integers wrap;
// the last three work on the bits of integers and are refused for other types.
enum class Combine : std::uint8_t { sum, mean, maximum, minimum, product, bitwise_and, bitwise_or, bitwise_xor };

constexpr bool is_bitwise(Combine combine) { return combine >= Combine::bitwise_and; }

constexpr bool is_integer(DataType type) { return type == DataType::int32 || type == DataType::int64; }

constexpr std::size_t size_of(DataType type) {
  switch (type) {
    case DataType::float32:
    case DataType::int32: return 4;
    case DataType::float64:
    case DataType::int64: return 8;
    case DataType::bfloat16:
    case DataType::float16: return 2;
  }
  return 0;
}

constexpr std::string_view to_string(DataType type) {
  switch (type) {
    case DataType::float32: return "float32";
    case DataType::float64: return "float64";
    case DataType::bfloat16: return "bfloat16";
    case DataType::float16: return "float16";
    case DataType::int32: return "int32";
    case DataType::int64: return "int64";
  }
  return "?";
}

constexpr std::string_view to_string(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return "all_reduce";
    case Collective::reduce: return "reduce";
    case Collective::broadcast: return "broadcast";
    case Collective::all_gather: return "all_gather";
    case Collective::reduce_scatter: return "reduce_scatter";
    case Collective::gather: return "gather";
    case Collective::scatter: return "scatter";
    case Collective::all_to_all: return "all_to_all";
    case Collective::barrier: return "barrier";
    case Collective::send: return "send";
    case Collective::receive: return "receive";
  }
  return "?";
}

constexpr std::string_view to_string(Combine combine) {
  switch (combine) {
    case Combine::sum: return "sum";
    case Combine::mean: return "mean";
    case Combine::maximum: return "maximum";
    case Combine::minimum: return "minimum";
    case Combine::product: return "product";
    case Combine::bitwise_and: return "bitwise and";
    case Combine::bitwise_or: return "bitwise or";
    case Combine::bitwise_xor: return "bitwise xor";
  }
  return "?";
}

constexpr std::optional<DataType> data_type_named(std::string_view name) {
  for (auto type : kDataTypes)
    if (to_string(type) == name) return type;
  return std::nullopt;
}

}  // namespace rejoin

#pragma GCC visibility pop
