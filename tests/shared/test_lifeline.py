"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from shared import lifeline

WATCHED = """
import signal, sys, time
from shared import lifeline
{handler}
lifeline.watch(int(sys.argv[1]), budget_s=0.3)
print("watching", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("handler", "status"),
    [
        ("", -signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", 7),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 1),
    ],
    ids=["plain", "orderly", "stubborn"],
)
def test_a_process_ends_at_the_eof_of_its_lifeline(handler: str, status: int) -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", WATCHED.format(handler=handler), str(read_end)],
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        os.close(read_end)
        assert child.stdout is not None
        assert child.stdout.readline() == b"watching\n"
        assert child.poll() is None
        os.close(write_end)
        assert child.wait(10) == status


def test_a_program_that_is_not_ours_dies_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(
        target=lambda: started.append(subprocess.Popen(["sleep", "60"], preexec_fn=lifeline.die_with_parent()))
    )
    thread.start()
    thread.join()
    assert started[0].wait(10) == -signal.SIGKILL
