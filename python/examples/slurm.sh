#!/bin/bash
# A Rejoin job as a Slurm array: each task of the array is a replica of one node, which is started again when it dies.
#
#   export REJOIN_COORDINATOR=HOST:7000 REJOIN_JOB_KEY_FILE=$HOME/key
#   sbatch --array=0-3 slurm.sh train.py
#
# The coordinator runs where it stays, say on a service node: docs/pytorch.md, "On several machines".
# A script of PyTorch ends with 1 for a wrong setting, too, and is started again; the daemon's log and its own say why.
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8
#SBATCH --requeue --open-mode=append
#SBATCH --signal=B:TERM@120
# A node that fails costs this replica alone: Slurm puts its task into the queue again. Two minutes before the time limit,
# and with scancel --batch --signal=TERM, the replica leaves at the end of a step.
set -u
: "${REJOIN_COORDINATOR:?is not set: HOST:PORT of the coordinator, or of all coordinators}"
: "${REJOIN_JOB_KEY_FILE:?is not set: the file with the job key, on a file system that all nodes have}"
export REJOIN_TRANSPORT=${REJOIN_TRANSPORT:-tcp} REJOIN_DATA_LISTEN=${REJOIN_DATA_LISTEN:-0.0.0.0:0}

leaves='' replica=''
trap 'leaves=yes; [[ -z $replica ]] || kill -TERM "$replica" 2>/dev/null' TERM
while [[ -z $leaves ]]; do
  # SLURM_ARRAY_TASK_ID says which replica this is; torchrun, which rank a process has.
  srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node "${RANKS:-8}" "$@" &
  replica=$!
  [[ -z $leaves ]] || kill -TERM "$replica"  # the signal came before there was somebody to tell
  wait "$replica"
  status=$?
  [[ $status -eq 0 || $status -eq 2 ]] && exit "$status"  # the job is over; or a setting is wrong, and would be again
  [[ -z $leaves ]] || wait "$replica"  # the signal has ended the first wait
  replica=''
  sleep 1
done
