"""A worker of torchrun that does not outlive it: torchrun gives each a session of its own, and killed it ends none."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop("_TORCHRUN")):  # killed before that
        sys.exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])
