// The kernels as they were built: a fatbin in the program, or, where no nvcc was found, a line that says so.
#pragma once

#include <string_view>

namespace rejoin::device::kernels {

std::string_view image();
bool built();  // whether there are any

}  // namespace rejoin::device::kernels
