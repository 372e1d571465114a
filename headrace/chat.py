"""`headrace chat`: a conversation in the terminal, streamed from the ingress."""

import json
import signal
import sys
from typing import Any

import httpx

from shared.errors import HeadraceError, Unavailable, by_code

CONNECT_TIMEOUT_S = 5.0


def chat(url: str, model: str, message: str | None, sampling: dict[str, Any], key: str | None) -> None:
    """Answer `message`, or talk until Ctrl-D. `sampling` goes into each request as it is; `key` is an API key.

    Raises HeadraceError when a single answer cannot be had.
    """
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, timeout=timeout, headers=headers) as client:
        if message is not None or not sys.stdin.isatty():
            text = message if message is not None else sys.stdin.read()
            _answer(client, model, [{"role": "user", "content": text}], sampling)
            return
        # a shell that started us in the background left SIGINT ignored, and Python leaves it so
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print(f"{model} at {url}; Ctrl-C stops an answer, Ctrl-D ends")
        _converse(client, model, sampling)


def _converse(client: httpx.Client, model: str, sampling: dict[str, Any]) -> None:
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            messages = [*asked, {"role": "assistant", "content": _answer(client, model, asked, sampling)}]
        except KeyboardInterrupt:
            print(" [stopped]")
        except HeadraceError as error:
            print(f"error: {error}", file=sys.stderr)


def _answer(client: httpx.Client, model: str, messages: list[dict[str, str]], sampling: dict[str, Any]) -> str:
    """Print one answer as it comes; its text. A stream that ends without [DONE] is an error."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True, **sampling}
    answer, told = "", False
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise _error(response.json())
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    print()
                    return answer
                if data == line:  # a keepalive comment, or the empty line after an event
                    if line.startswith(":") and not (answer or told) and sys.stderr.isatty():
                        told = True
                        print("(waiting for a worker to start)", file=sys.stderr)
                    continue
                event = json.loads(data)
                if "error" in event:
                    if answer:
                        print()
                    raise _error(event)
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    answer += text
                    print(text, end="", flush=True)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise Unavailable(f"{client.base_url} cannot be reached or broke off: {error}") from error
    raise Unavailable(f"{client.base_url} ended the answer before it was complete")


def _error(body: dict[str, Any]) -> HeadraceError:
    error = body.get("error", {})
    return by_code(error.get("code", ""), error.get("message", str(body)))
