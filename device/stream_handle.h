// A CUDA stream as programs hold it, without CUDA's headers.
#pragma once

struct CUstream_st;

namespace rejoin {

using CudaStream = CUstream_st*;  // a cudaStream_t, or CUstream

}  // namespace rejoin
