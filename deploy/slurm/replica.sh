#!/bin/bash
# A Rejoin job of C++ (or any) trainers under Slurm: each task of the array is a replica, on one node of its own.
#
#   export REJOIN_COORDINATOR=HOST:7000 REJOIN_JOB_KEY_FILE=$HOME/key RANKS=8
#   sbatch --array=0-3 --gpus-per-node=8 replica.sh ./trainer ARGS...
#
# The coordinator runs where it stays, say as rejoin-coordinator@JOB on a service node. Packages have one version everywhere.
#SBATCH --nodes=1 --exclusive
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:TERM@120
# A node that fails costs this replica alone: Slurm puts its task into the queue again. Two minutes before the time limit,
# and with scancel --batch --signal=TERM, its trainers get SIGTERM, which those that heed it answer by leaving the job.
set -u
: "${REJOIN_COORDINATOR:?is not set: HOST:PORT of the coordinator, or of all coordinators}"
: "${REJOIN_JOB_KEY_FILE:?is not set: the file with the job key, on a file system that all nodes have}"
: "${SLURM_ARRAY_TASK_ID:?is not set: submit this with sbatch --array=0-N}"
[[ $# -gt 0 ]] || { echo "no trainer is named: sbatch --array=0-N replica.sh ./trainer ARGS..." >&2; exit 2; }
export REJOIN_TRANSPORT=${REJOIN_TRANSPORT:-tcp} REJOIN_DATA_LISTEN=${REJOIN_DATA_LISTEN:-0.0.0.0:0}
export REJOIN_REPLICA=$SLURM_ARRAY_TASK_ID REJOIN_NODE=$SLURMD_NODENAME
# The switches above this node and its name, "s0.s4.node7", where Slurm's topology plugin says them.
topology=${SLURM_TOPOLOGY_ADDR:-}
export REJOIN_LOCATION=${REJOIN_LOCATION-$(tr . / <<< "$topology" | tr -c '[:alnum:]._/\n-' _)}

rejoin doctor || true  # what this node lacks is in the job's output

place=$(mktemp -d "${TMPDIR:-/tmp}/rejoin-$SLURM_JOB_ID-XXXXXX")
# A step of its own, beside the trainers'. It is made anew where it dies; its trainers find the next one.
(
  step='' told=''
  trap 'told=yes; [[ -z $step ]] || kill -TERM "$step" 2>/dev/null' TERM
  while [[ -z $told ]]; do
    srun --overlap --ntasks=1 --job-name=rejoind rejoind --socket "$place/socket" & step=$!
    [[ -z $told ]] || kill -TERM "$step"  # it was told before there was a step to tell
    wait "$step"
    status=$?
    [[ -n $told ]] && { wait "$step"; exit; }
    [[ $status -eq 0 || $status -eq 2 ]] && exit "$status"  # it was told to end otherwise; or its settings are wrong
    step=''
    sleep 1
  done
) &
daemon=$!
trap 'kill -TERM "$daemon" 2>/dev/null; wait "$daemon"; rm -rf "$place"' EXIT

export REJOIN_SOCKET=$place/socket
leaves='' replica=''
trap 'leaves=yes; [[ -z $replica ]] || kill -TERM "$replica" 2>/dev/null' TERM
while [[ -z $leaves ]]; do
  # One that fails ends the others of its replica; all are started again, and catch up.
  srun --overlap --overcommit --ntasks="${RANKS:-1}" --kill-on-bad-exit=1 bash -c 'REJOIN_RANK=$SLURM_PROCID exec "$@"' rank "$@" &
  replica=$!
  [[ -z $leaves ]] || kill -TERM "$replica"  # the signal came before there was somebody to tell
  wait "$replica"
  status=$?
  [[ $status -eq 0 || $status -eq 2 ]] && exit "$status"  # the job is over; or its settings are wrong, and would be again
  [[ -z $leaves ]] || wait "$replica"  # the signal has ended the first wait
  replica=''
  kill -0 "$daemon" 2>/dev/null || { wait "$daemon"; exit; }  # it is not made anew, and nobody trains without it
  sleep 1
done
