"""`headrace chat`: a conversation in the terminal, streamed from the ingress."""

import contextlib
import json
import signal
import sys
import time
from typing import Any

import httpx

from headrace import http
from headrace.globals import Globals
from shared.errors import HeadraceError, Unavailable

HEAD_HELD_S = 1.0  # an ingress that has no token by then begins its answer without one

Messages = list[dict[str, str]]


def chat(given: Globals, model: str, message: str | None, system: str | None, sampling: dict[str, Any]) -> None:
    """Answer `message`, or talk until Ctrl-D. `sampling` goes into each request as it is.

    Raises StackError, and HeadraceError when a single answer cannot be had.
    """
    before: Messages = [] if system is None else [{"role": "system", "content": system}]
    with http.client(given, read_timeout_s=None) as client:
        if message is not None:
            _answer(client, model, [*before, {"role": "user", "content": message}], sampling, [])
            return
        # a shell that started us in the background left SIGINT ignored, and Python leaves it so
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(ImportError):  # then lines are not edited, and not called back
            import readline  # noqa: F401
        print(f"{model} at {given.http_url()}; Ctrl-C stops an answer, Ctrl-D ends")
        _converse(client, model, before, sampling)


def _converse(client: httpx.Client, model: str, messages: Messages, sampling: dict[str, Any]) -> None:
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        asked = [*messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            _answer(client, model, asked, sampling, said)
        except KeyboardInterrupt:
            print(" [stopped]")
        except HeadraceError as error:
            print(f"error: {error}", file=sys.stderr)
        if said:  # what came of an answer belongs to the conversation
            messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def _answer(client: httpx.Client, model: str, messages: Messages, sampling: dict[str, Any], said: list[str]) -> None:
    """Print one answer as it comes, and append its pieces to `said`. A stream that ends without [DONE] is an error."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True, **sampling}
    asked, finish = time.monotonic(), None
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_success:
                raise http.error_of(response)
            if time.monotonic() - asked >= HEAD_HELD_S:
                _note("waiting for the first word; a worker may have to start")
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    print()
                    if finish == "length":
                        _note("cut: --max-tokens allows more")
                    return
                if data == line:  # a keepalive comment, or the empty line after an event
                    continue
                event = json.loads(data)
                if "error" in event:
                    if said:
                        print()
                    raise http.error_in(event)
                for choice in event["choices"]:
                    finish = choice.get("finish_reason") or finish
                    if text := choice["delta"].get("content"):
                        said.append(text)
                        print(text, end="", flush=True)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise Unavailable(f"{client.base_url} cannot be reached or broke off: {error}") from error
    raise Unavailable(f"{client.base_url} ended the answer before it was complete")


def _note(text: str) -> None:
    """Tell a person who watches something that is not of the answer."""
    if sys.stderr.isatty():
        print(f"({text})", file=sys.stderr)
