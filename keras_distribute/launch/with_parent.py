"""Becomes another program, which ends with the process that started it, even if that is
killed: `python with_parent.py PARENT COMMAND...`.

To be exact, with the thread that started it (`man 2 prctl`). The new process asks for
this itself: asked between fork and exec, as `preexec_fn` does, Python code would run in
a copy of a process of which other threads, such as XLA's, may hold locks for ever.
Imports nothing of the package, and little of Python: it is there for 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # It ended before.
        sys.exit(128 + signal.SIGKILL)
    os.execvp(command[0], command)
