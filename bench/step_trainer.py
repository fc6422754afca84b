"""One rank of a job that does nothing but all-reduce a bucket and commit, for rejoin_step_perf --python.

Arguments: the file of progress (bench/job.h: two numbers of 64 bits a replica), and the bucket's bytes.
"""

import mmap
import os
import struct
import sys

import rejoin._native as rejoin

replica, size = int(os.environ["REJOIN_REPLICA"]), int(sys.argv[2])
with open(sys.argv[1], "r+b") as file:
    progress = mmap.mmap(file.fileno(), 0)
session = rejoin.Session([f"replica={replica}", "rank=0"])
session.bucket([session.add("w", 0, size // 4, 0, True)])
session.allocate()
session.join()
while (step := session.begin_step()) is not None:
    if step[1]:
        session.all_reduce(0)
    if (updates := session.begin_update()) is not None:
        session.end_update()
        if step[1]:
            struct.pack_into("QQ", progress, 16 * replica, step[0], updates[0][4])
