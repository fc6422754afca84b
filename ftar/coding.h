// Chunks coded with a bounded error, for links that are slower than the coder: the CPU's coder (a GPU's is
// device/kernels/code.h), and the setting. See "Coded gradients" in docs/design-notes.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/coded_chunk.h"
#include "base/result.h"
#include "base/types.h"

namespace rejoin::ftar {

// What is sent to a neighbour: as it is; by how fast the link to it has been and by how much coding loses; or always
// coded in so many bits.
enum class Coding : std::uint8_t { off, automatic, eight, four };
Result<Coding> coding_named(std::string_view name);  // "off", "auto", "8", "4"
std::string_view to_string(Coding coding);

namespace coding {

using namespace rejoin::coding;  // base/coded_chunk.h

Loss run(const Pass& pass);
void decode(DataType type, Width width, std::byte* out, const std::byte* coded, std::size_t count);

// The same compiled for a set of instructions by its name (ftar/reduce.h), for tests; false: this CPU lacks it.
bool run_with(std::string_view set, const Pass& pass, Loss& loss);
bool decode_with(std::string_view set, DataType type, Width width, std::byte* out, const std::byte* coded,
                 std::size_t count);

// Bytes of elements a second that this CPU codes and decodes, as a hop does: measured by the first call (some ms).
double rate();

}  // namespace coding
}  // namespace rejoin::ftar
