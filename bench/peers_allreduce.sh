#!/usr/bin/env bash
# All-reduce over shared memory beside Open MPI's (its default, and its segmented ring), and over TCP beside torch's Gloo,
# one after the other, three rounds: milliseconds for 64 MiB and microseconds for 4 KiB of float32. Needs openmpi-bin,
# libopenmpi-dev, and a Python with torch: build/python-venv's, or that of $PYTHON. Gloo is called from Python, as torch's
# users do, which is a part of its 4 KiB.
set -euo pipefail
bench=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=$(cd "$bench/../build/release/bin" && pwd)
python=${PYTHON:-$bench/../build/python-venv/bin/python}
"$python" -c 'import torch' || { echo "no torch in $python: make it by ./run python, or set PYTHON" >&2; exit 1; }
scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT
command -v mpicc >/dev/null || { echo "no mpicc here: install openmpi-bin and libopenmpi-dev" >&2; exit 1; }
cat >"$scratch/all_reduce.c" <<'C'
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int count = atoi(argv[1]), iterations = atoi(argv[2]);
  float *in = malloc(4ul * count), *out = malloc(4ul * count);
  for (int i = 0; i < count; ++i) in[i] = (float)i, out[i] = 0;
  for (int i = 0; i < 3 + iterations / 10; ++i) MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  for (int i = 0; i < iterations; ++i) MPI_Allreduce(in, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  const double took = (MPI_Wtime() - start) / iterations;
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) printf("%.2f\n", took * 1e6);
  MPI_Finalize();
}
C
mpicc -O3 -o "$scratch/all_reduce" "$scratch/all_reduce.c"
mpi() { # ranks floats iterations options… → µs
  local ranks=$1 floats=$2 iterations=$3; shift 3
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n "$ranks" --mca pml ob1 --mca btl vader,self "$@" \
    "$scratch/all_reduce" "$floats" "$iterations" 2>"$scratch/mpi" || { cat "$scratch/mpi" >&2; return 1; }
}
ours() { # transport ranks bytes iterations → µs
  "$bin/rejoin_allreduce_perf" --transport "$1" --ranks "$2" -b "$3" -e "$3" -n "$4" -w $(($4 / 10 + 3)) 2>/dev/null | awk '!/^#/ { print $5 }'
}
gloo() { # ranks floats iterations → µs
  "$python" "$bench/gloo_allreduce.py" "$@" 2>"$scratch/gloo" || { cat "$scratch/gloo" >&2; return 1; }
}
ms() { awk '{ print $1 / 1000 }' <<<"$1"; }
ring="--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 5"
for round in 1 2 3; do
  for ranks in 2 3 4; do
    # shellcheck disable=SC2086
    mpi_large=$(mpi "$ranks" 16777216 10) mpi_ring=$(mpi "$ranks" 16777216 10 $ring) mpi_small=$(mpi "$ranks" 1024 2000)
    gloo_large=$(gloo "$ranks" 16777216 10) gloo_small=$(gloo "$ranks" 1024 1000)
    printf '%s processes: 64 MiB, ms: Open MPI %8.1f, its ring %8.1f, ours %8.1f    4 KiB, µs: Open MPI %7.1f, ours %7.1f\n' "$ranks" \
      "$(ms "$mpi_large")" "$(ms "$mpi_ring")" "$(ms "$(ours shm "$ranks" 67108864 10)")" "$mpi_small" "$(ours shm "$ranks" 4096 2000)"
    printf '%s processes over TCP: 64 MiB, ms: Gloo %8.1f, ours %8.1f    4 KiB, µs: Gloo %7.1f, ours %7.1f\n' "$ranks" \
      "$(ms "$gloo_large")" "$(ms "$(ours tcp "$ranks" 67108864 10)")" "$gloo_small" "$(ours tcp "$ranks" 4096 1000)"
  done
done
