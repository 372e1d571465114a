"""How processes end with the one that started them, even when that one is killed with SIGKILL.

Ours watch a lifeline: a pipe whose write end only the supervisor holds, so that its read end is at EOF the moment the
supervisor is gone. Programs that are not ours get PR_SET_PDEATHSIG instead.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

TERM_BUDGET_S = 3.0


def watch(fd: int, budget_s: float = TERM_BUDGET_S) -> threading.Thread:
    """End this process when the pipe `fd` is at EOF: SIGTERM to itself, `budget_s` seconds to comply, then a hard exit.

    The thread that watches is a daemon. The fd stays inheritable, for children that watch it too.
    """

    def run() -> None:
        while True:
            try:
                if not os.read(fd, 1):
                    break
            except InterruptedError:
                continue
            except OSError:  # closed by this process itself, which then has no lifeline to end on
                return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(budget_s)
        os._exit(1)

    thread = threading.Thread(target=run, name="lifeline", daemon=True)
    thread.start()
    return thread


def die_with_parent() -> Callable[[], None]:
    """A `preexec_fn` for programs that are not ours: SIGKILL to the child when the *thread* that started it ends.

    So start such a child from a thread that lives as long as the process: the main thread.
    """
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before prctl took hold
            os._exit(1)

    return in_child


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent dies. Raises OSError where the kernel refuses."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
