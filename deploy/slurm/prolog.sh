#!/bin/bash
# For slurm.conf: Prolog=/usr/share/doc/rejoin/examples/slurm/prolog.sh
# A node on which a check fails (a GPU without driver; with DOCTOR_TRANSPORT=ibverbs a NIC without link, or memory that
# can't be registered) is drained, and the job goes back into the queue: Slurm does so where a prolog ends with an error.
case ${SLURM_JOB_COMMENT:-} in
  *rejoin*) exec timeout 30 rejoin doctor --transport "${DOCTOR_TRANSPORT:-tcp}" --data-listen 0.0.0.0:0 ;;
esac
