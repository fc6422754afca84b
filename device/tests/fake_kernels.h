// The kernels of the software driver (fake_cuda.cc): their bodies, run by threads of the CPU.
#pragma once

#include "device/kernels/mailbox.h"

namespace rejoin::device::fake {

void run_reduce(unsigned blocks, const kernels::ReduceArguments& arguments);
void run_code(unsigned blocks, const kernels::ReduceArguments& arguments);
void run_digest(const kernels::DigestArguments& arguments);

}  // namespace rejoin::device::fake
