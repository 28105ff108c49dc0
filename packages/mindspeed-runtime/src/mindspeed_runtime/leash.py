"""Importing this has the process end with the one that started it. For Python's fork server, which imports it first.

The server would end by itself once what it preloads is imported, which may take seconds. The kernel does it at once, and
clears the request in the processes that the server forks (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if sys.platform == "linux":
    starter = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it ended before the request was made
        os.kill(os.getpid(), signal.SIGKILL)
