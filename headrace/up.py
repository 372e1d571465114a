"""`headrace up` and `headrace down`: a stack in this terminal or in the background, and its end."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from headrace import demo
from headrace.stack import reports, state, supervisor
from headrace.stack.plan import Plan
from headrace.stack.process import tail
from headrace.stack.reports import Failed, Progress, Ready
from headrace.stack.state import StackError
from shared.settings import Settings, SettingsError

DOWN_MARGIN_S = 15.0  # on top of the drains of ingress and workers
LIFELINE_BUDGET_S = 10.0


def foreground(data: Path, port: int | None, with_demo: bool) -> None:
    """Run a stack until Ctrl-C or a signal. Raises StackError."""

    def on_ready(plan: Plan) -> None:
        say(banner(data, plan.state.http, with_demo) + "\n\nCtrl-C ends it.")

    supervisor.run(data, port, with_demo, lambda line: say(f"  {line}"), on_ready)
    say("ended")


def reporting(data: Path, port: int | None, with_demo: bool, report_fd: int) -> None:
    """Run a stack for `background`: what there is to tell goes to the pipe, and to standard output for the log."""
    send = reports.sender(report_fd)

    def report(line: str) -> None:
        say(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}")
        send(Progress(line))

    try:
        supervisor.run(data, port, with_demo, report, lambda plan: send(Ready(plan.state.http)))
    except (StackError, SettingsError, OSError) as error:
        send(Failed(str(error)))
        raise


def background(data: Path, port: int | None, with_demo: bool) -> None:
    """Start a stack that outlives this process; return when it is ready. Raises StackError."""
    state.make_directory(data)
    log = data / "logs" / "supervisor.log"
    log.parent.mkdir(exist_ok=True)
    read_end, write_end = os.pipe()
    arguments = ["--data", str(data), "up", "--report-fd", str(write_end)]
    arguments += [] if port is None else ["--port", str(port)]
    arguments += [] if with_demo else ["--no-demo"]
    with open(log, "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(write_end,),
        )
    os.close(write_end)
    try:
        with open(read_end, "rb") as lines:
            for line in lines:
                match reports.decode(line):
                    case Progress(text):
                        say(f"  {text}")
                    case Ready(http):
                        child.returncode = 0  # it goes on without us
                        say(banner(data, http, with_demo))
                        return
                    case Failed(message):
                        child.wait()
                        raise StackError(message)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise
    raise StackError(f"the supervisor ended with status {child.wait()}; the end of {log}:\n{tail(log)}")


def down(data: Path, drain_budget_s: float) -> None:
    """End the stack of a data directory, and wait until nothing of it is left. Raises StackError if something is."""
    pid = state.holder(data)
    found = state.read(data)
    if pid is None:
        say(f"no stack is running on {data}")
        return
    say(f"ending the stack on {data} (pid {pid})")
    os.kill(pid, signal.SIGTERM)
    budget_s = 2 * drain_budget_s + DOWN_MARGIN_S
    if not _released(data, budget_s):
        say(f"it did not end within {budget_s:.0f} s: killing it")
        os.kill(pid, signal.SIGKILL)
        _released(data, LIFELINE_BUDGET_S)
    left = [pid, *(process.pid for process in found.processes.values())] if found else [pid]
    deadline = time.monotonic() + LIFELINE_BUDGET_S
    while left := [pid for pid in left if psutil.pid_exists(pid) and not _zombie(pid)]:
        if time.monotonic() > deadline:
            raise StackError(f"processes {left} of the stack are still there")
        time.sleep(0.05)
    say("ended")


def _zombie(pid: int) -> bool:
    """Whether it has ended already and only its parent has not looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def banner(data: Path, http: str, with_demo: bool) -> str:
    """What a person needs to know once the stack is up."""
    command = _command(data)
    lines = [f"Headrace is up at {http}", ""]
    if with_demo:
        lines += [
            f"  curl -N {http}/v1/chat/completions -H 'content-type: application/json' -d '",
            f'    {{"model": "{demo.MODEL}", "stream": true, "temperature": 0,',
            '     "messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
            "",
            f"  {command} chat {demo.MODEL}",
        ]
    else:
        lines += [f"  {command} models push sim:zero --name zero --version v1", f"  {command} chat zero"]
    return "\n".join([*lines, f"  {command} status", f"  {command} down", f"  logs: {data / 'logs'}"])


def say(line: str) -> None:
    print(line, flush=True)


def _command(data: Path) -> str:
    """How this person starts `headrace`, from where they are and for this data directory."""
    beside = Path(sys.executable).parent / "headrace"
    on_path = shutil.which("headrace")
    command = "headrace" if on_path and Path(on_path).resolve() == beside.resolve() else os.path.relpath(beside)
    return command if data == Settings().data_path else f"{command} --data {shlex.quote(str(data))}"


def _released(data: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while state.holder(data) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
