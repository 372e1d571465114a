"""From a request that finds no worker to its first token: with a warm worker, and without.

python bench/cold_start.py DIRECTORY    # of a model's safetensors; stacks of its own, three starts each
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

STARTS = 3
CALM_WITHIN_S = 60.0
QUESTION = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
    "stream": True,
}


class Stack:
    """A local stack whose workers end after two seconds without work."""

    def __init__(self, data: Path, warm_workers: int) -> None:
        self._command = [sys.executable, "-m", "headrace", "--data", str(data)]
        self._environment = os.environ | {"HEADRACE_WARM_WORKERS": str(warm_workers), "HEADRACE_IDLE_SECONDS": "2"}
        self._warm_workers = warm_workers

    def run(self, *arguments: str) -> str:
        command = [*self._command, *arguments]
        return subprocess.run(command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", "--json"))
        return found

    def calm(self) -> str:
        """Wait until there is no worker but the warm ones; the stack's URL."""
        deadline = time.monotonic() + CALM_WITHIN_S
        while True:
            status = self.status()
            states = [each["state"] for each in status["workers"]]
            if states == ["warm"] * self._warm_workers:
                return str(status["http"])
            if time.monotonic() > deadline:
                raise SystemExit(f"there are workers that do not end: {states}")
            time.sleep(0.3)


def first_token_s(url: str) -> float:
    begin = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=QUESTION, timeout=120) as response:
        for line in response.iter_lines():
            if '"content":"' in line and '"content":""' not in line:
                return time.monotonic() - begin
    raise ValueError(f"the answer has no text (status {response.status_code})")


def main(directory: str) -> None:
    for warm_workers in (1, 0):
        with tempfile.TemporaryDirectory(prefix="headrace-cold-") as data:
            stack = Stack(Path(data) / "data", warm_workers)
            stack.run("up", "--detach", "--no-demo", "--port", "0")
            try:
                stack.run("models", "push", directory, "--name", "m", "--version", "v1")
                times = [first_token_s(stack.calm()) for _ in range(STARTS)]
            finally:
                stack.run("down")
        kind = "a warm worker" if warm_workers else "no worker"
        print(f"{kind}: first token after {', '.join(f'{each:.2f}' for each in times)} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
