"""Child processes that must not outlive their parent."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends; no effect elsewhere.

    On other systems the process ends when its connection to the parent closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
