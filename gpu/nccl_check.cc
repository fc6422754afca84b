// rejoin_nccl_check: NCCL's all-reduce, all-gather and broadcast between processes that share one GPU, every element
// checked. Which network carries them is NCCL's to choose (NCCL_NET_PLUGIN, NCCL_NET): gpu/run.sh runs it with ours and
// with NCCL's sockets. Each process says that it is another host (NCCL_HOSTID), so that NCCL takes them for different
// GPUs, and uses the network.
#include <cuda_runtime.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace {

struct Failure {
  std::string what;
};
void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Failure{std::string(what) + ": " + cudaGetErrorString(status)};
}
void check(ncclResult_t status, const char* what) {
  if (status != ncclSuccess)
    throw Failure{std::string(what) + ": " + ncclGetErrorString(status) + ": " + ncclGetLastError(nullptr)};
}

float value_at(int rank, std::size_t i) {
  return static_cast<float>((i * 7 + static_cast<std::size_t>(rank) * 3) % 16);
}

class Rank {
 public:
  Rank(int rank, int ranks, const ncclUniqueId& id) : rank_(rank), ranks_(ranks) {
    check(cudaSetDevice(0), "taking the GPU");
    check(cudaStreamCreate(&stream_), "making a stream");
    check(ncclCommInitRank(&comm_, ranks, id, rank), "ncclCommInitRank");
    check(cudaMalloc(&in_, kMost * sizeof(float)), "allocating");
    check(cudaMalloc(&out_, kMost * sizeof(float) * static_cast<std::size_t>(ranks)), "allocating");
    std::vector<float> values(kMost);
    for (std::size_t i = 0; i < kMost; ++i) values[i] = value_at(rank, i);
    check(cudaMemcpy(in_, values.data(), kMost * sizeof(float), cudaMemcpyHostToDevice), "filling");
  }
  ~Rank() {
    (void)ncclCommDestroy(comm_);
    (void)cudaFree(in_);
    (void)cudaFree(out_);
  }

  void run() {
    using Operation = std::function<ncclResult_t(std::size_t)>;
    using Expected = std::function<float(std::size_t, std::size_t)>;  // at an index, of so many elements
    const struct {
      const char* name;
      Operation operation;
      Expected expected;
      bool of_all;  // the result has every rank's elements
    } kinds[] = {
        {"all_reduce", [&](std::size_t n) { return ncclAllReduce(in_, out_, n, ncclFloat, ncclSum, comm_, stream_); },
         [&](std::size_t i, std::size_t) {
           float sum = 0;
           for (int r = 0; r < ranks_; ++r) sum += value_at(r, i);
           return sum;
         },
         false},
        {"all_gather", [&](std::size_t n) { return ncclAllGather(in_, out_, n, ncclFloat, comm_, stream_); },
         [&](std::size_t i, std::size_t n) { return value_at(static_cast<int>(i / n), i % n); }, true},
        {"broadcast", [&](std::size_t n) { return ncclBroadcast(in_, out_, n, ncclFloat, 0, comm_, stream_); },
         [&](std::size_t i, std::size_t) { return value_at(0, i); }, false},
    };
    for (const auto& kind : kinds)
      for (std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{65537}, kMost}) {
        const std::size_t results = count * (kind.of_all ? static_cast<std::size_t>(ranks_) : 1);
        check(cudaMemset(out_, 0xee, results * sizeof(float)), "poisoning the result");
        const auto once = [&] {
          check(kind.operation(count), kind.name);
          check(cudaStreamSynchronize(stream_), kind.name);
          ncclResult_t later = ncclSuccess;
          check(ncclCommGetAsyncError(comm_, &later), "asking for errors");
          check(later, kind.name);
        };
        once();
        std::vector<float> result(results);
        check(cudaMemcpy(result.data(), out_, results * sizeof(float), cudaMemcpyDeviceToHost), "reading");
        for (std::size_t i = 0; i < results; ++i)
          if (result[i] != kind.expected(i, count))
            throw Failure{std::string(kind.name) + ": element " + std::to_string(i) + " is " +
                          std::to_string(result[i]) + " instead of " + std::to_string(kind.expected(i, count))};
        constexpr int iterations = 20;
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < iterations; ++i) once();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (rank_ == 0)
          std::printf("%-12s %12zu B %12.1f us %9.3f GB/s  right\n", kind.name, count * sizeof(float),
                      took.count() / iterations * 1e6,
                      static_cast<double>(count * sizeof(float)) / (took.count() / iterations) * 1e-9);
      }
  }

 private:
  static constexpr std::size_t kMost = std::size_t{16} << 20;
  const int rank_, ranks_;
  cudaStream_t stream_ = nullptr;
  ncclComm_t comm_ = nullptr;
  float *in_ = nullptr, *out_ = nullptr;
};

}  // namespace

int main() {
  constexpr int ranks = 2;
  int pipes[2];
  if (::pipe(pipes) != 0) return std::perror("pipe"), 1;
  const pid_t child = ::fork();
  if (child < 0) return std::perror("fork"), 1;
  const int rank = child == 0 ? 1 : 0;
  ::setenv("NCCL_HOSTID", rank == 0 ? "rejoin-a" : "rejoin-b", 1);
  int status = 0;
  try {
    ncclUniqueId id;
    if (rank == 0) {
      check(ncclGetUniqueId(&id), "ncclGetUniqueId");
      if (::write(pipes[1], &id, sizeof id) != sizeof id) throw Failure{"telling the other process"};
    } else if (::read(pipes[0], &id, sizeof id) != sizeof id) {
      throw Failure{"the other process wrote nothing"};
    }
    Rank(rank, ranks, id).run();
  } catch (const Failure& failure) {
    std::fprintf(stderr, "rejoin_nccl_check: rank %d: %s\n", rank, failure.what.c_str());
    status = 1;
  }
  if (child == 0) return status;
  if (status != 0) ::close(pipes[1]);
  int other = 0;
  ::waitpid(child, &other, 0);
  return status != 0 || !WIFEXITED(other) || WEXITSTATUS(other) != 0 ? 1 : 0;
}
