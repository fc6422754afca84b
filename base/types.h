// Element types and operations of an all-reduce.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace rejoin {

enum class DataType : std::uint8_t { float32, float64, bfloat16, float16, int32, int64 };
inline constexpr DataType kDataTypes[] = {DataType::float32, DataType::float64, DataType::bfloat16,
                                          DataType::float16, DataType::int32,   DataType::int64};

// Sum: 16-bit types are added in float32 and rounded (to nearest even) once a hop. Mean: the sum, multiplied by the
// float reciprocal of the number of contributors before the last rounding; for integers, divided towards zero.
enum class ReduceOp : std::uint8_t { sum, mean };

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

constexpr std::optional<DataType> data_type_named(std::string_view name) {
  for (auto type : kDataTypes)
    if (to_string(type) == name) return type;
  return std::nullopt;
}

}  // namespace rejoin
