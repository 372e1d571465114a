"""Tenants on real processes: three ingresses that require keys, one fleet behind them; and TLS from the client on."""

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from headrace.stack import ports
from shared.lifeline import die_with_parent
from shared.settings import Settings, to_environment

pytestmark = pytest.mark.e2e

READY_WITHIN_S = 30.0
REVOKED_WITHIN_S = 1.0
MODEL = "guarded"


class Ingress:
    """An ingress process beside those of a stack, at the same NATS."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings = replace(settings, http_port=ports.free_ports(1)[0])
        self.url = f"http://127.0.0.1:{self.settings.http_port}"
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "ingress"],
                env=os.environ | to_environment(self.settings),
                stderr=file,
                preexec_fn=die_with_parent(),
            )

    def status(self, key: str, client: httpx.Client) -> int:
        return client.get(f"{self.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + READY_WITHIN_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)
    return found


def listens(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def ingresses(stack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ingress]]:
    logs = tmp_path_factory.mktemp("ingresses")
    stack.push("sim:fixed-20ms", MODEL)
    settings = replace(stack.settings(), require_keys=True, attach_timeout_s=0.3, drain_linger_s=0.0)
    started = [Ingress(settings, logs / f"{number}.log") for number in range(3)]
    for each in started:
        wait_for(lambda url=each.url: listens(url), "an ingress is ready")
    yield started
    for each in started:
        each.process.terminate()
    for each in started:
        assert each.process.wait(20) == 0


@pytest.fixture
def new_key(stack: Any, ingresses: list[Ingress]) -> Callable[..., dict[str, Any]]:
    """Makes a tenant with a key that every ingress knows."""

    def make(tenant: str, *arguments: str) -> dict[str, Any]:
        ran = stack.headrace("tenants", "add", tenant, "--json", *arguments)
        assert ran.returncode == 0, ran.stderr
        made: dict[str, Any] = json.loads(ran.stdout)
        with httpx.Client() as client:
            for each in ingresses:
                wait_for(lambda ingress=each: ingress.status(made["key"], client) == 200, "the key is known")
        return made

    return make


def bearer(made: dict[str, Any], **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {made['key']}"} | {name.replace("_", "-"): value for name, value in more.items()}


def test_a_revoked_key_is_refused_everywhere_within_a_second_and_its_streams_go_on(
    ingresses: list[Ingress], new_key: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    admin, doomed = new_key("revoke-admin", "--role", "admin"), new_key("revoke-tenant")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 150}
    refused_at = [0.0] * len(ingresses)
    begun = threading.Barrier(len(ingresses) + 1)

    def look(number: int) -> None:
        with httpx.Client() as client:
            assert ingresses[number].status(doomed["key"], client) == 200
            begun.wait(READY_WITHIN_S)
            deadline = time.monotonic() + READY_WITHIN_S
            while ingresses[number].status(doomed["key"], client) == 200 and time.monotonic() < deadline:
                pass
            refused_at[number] = time.monotonic()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(len(ingresses))]
    path = f"{ingresses[0].url}/v1/chat/completions"
    with httpx.Client(timeout=60) as client, client.stream("POST", path, json=body, headers=bearer(doomed)) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        next(line for line in lines if '"content":' in line)
        for thread in threads:
            thread.start()
        begun.wait(READY_WITHIN_S)
        asked = time.monotonic()
        url = f"{ingresses[1].url}/v1/tenants/revoke-tenant/keys/{doomed['id']}"
        assert httpx.delete(url, headers=bearer(admin)).status_code == 200
        for thread in threads:
            thread.join()
        later = list(lines)
    took = [at - asked for at in refused_at]
    with capsys.disabled():
        print(f"\nrefused {', '.join(f'{each * 1000:.0f}' for each in took)} ms after the revocation was asked for")
    assert all(0 < each < REVOKED_WITHIN_S for each in took), took
    assert [line for line in later if line][-1] == "data: [DONE]"
    assert sum('"content":' in line for line in later) > 50
    for each in ingresses:
        answer = httpx.post(f"{each.url}/v1/chat/completions", json=body, headers=bearer(doomed))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_tenants_streams_and_keys_are_nobody_elses(
    stack: Any, ingresses: list[Ingress], new_key: Callable[..., dict[str, Any]]
) -> None:
    mine, theirs = new_key("streams-mine"), new_key("streams-theirs")
    ran = stack.headrace("tenants", "issue", "streams-mine", "--model", "another", "--json")
    elsewhere = json.loads(ran.stdout)
    one, other = ingresses[0].url, ingresses[2].url
    body = {"input": "Hi", "stream": True, "max_tokens": 1500}
    path = f"/v1/models/{MODEL}/infer"
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", one + path, json=body, headers=bearer(mine, x_resumable="true")) as stream,
    ):
        lines = stream.iter_lines()
        position = next(line for line in lines if line.startswith("id: ")).removeprefix("id: ")
        rid = position.split(".")[0]
        for way in (
            ("GET", f"/v1/streams/{rid}", {"last-event-id": position}),
            ("GET", f"/v1/streams/{rid}", {}),
            ("POST", f"/v1/streams/{rid}/cancel", {"last-event-id": position}),
            ("DELETE", f"/v1/streams/{rid}", {}),
        ):
            for url in (one, other):
                refused = client.request(way[0], url + way[1], headers=bearer(theirs) | way[2])
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "stream_not_found")
        wait_for(lambda: ingresses[2].status(elsewhere["key"], client) == 200, "the third key is known")
        refused = client.get(f"{other}/v1/streams/{rid}", headers=bearer(elsewhere, last_event_id=position))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        for sent in (bearer(elsewhere, last_event_id=position), bearer(elsewhere)):
            refused = client.delete(f"{other}/v1/streams/{rid}", headers=sent)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        next(line for line in lines if line.startswith("id: "))  # it goes on
        resumed = bearer(mine, last_event_id=position)
        with client.stream("GET", f"{other}/v1/streams/{rid}", headers=resumed) as again:
            assert again.status_code == 200
            next(line for line in again.iter_lines() if '"token"' in line)
        ended = client.delete(f"{other}/v1/streams/{rid}", headers=bearer(mine))
        assert ended.json() == {"id": rid, "status": "cancelled"}

        plain = {"input": "Hi", "max_tokens": 3}
        answers = [
            client.post(url + path, json=plain, headers=bearer(who, idempotency_key="the-same")).json()["id"]
            for who, url in ((mine, one), (theirs, other), (mine, other))
        ]
        assert answers[0] == answers[2] != answers[1]


def test_keys_and_tls_from_the_command_line_to_the_worker(own_stack: Any, certificates: Any) -> None:
    cert, key = certificates.server
    own_stack.env |= {
        "HEADRACE_HTTP_TLS_CERT": cert,
        "HEADRACE_HTTP_TLS_KEY": key,
        "HEADRACE_REQUIRE_KEYS": "true",
        "SSL_CERT_FILE": certificates.ca,
    }
    own_stack.up()
    assert own_stack.http.startswith("https://127.0.0.1:")
    own_stack.push("sim:zero", "secured")
    refused = own_stack.headrace("chat", "secured", "-m", "Hi", "--max-tokens", "4")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no API key was given" in refused.stderr
    made = json.loads(own_stack.headrace("tenants", "add", "someone", "--json").stdout)
    own_stack.env["HEADRACE_API_KEY"] = made["key"]

    def answered() -> Any:
        ran = own_stack.headrace("chat", "secured", "-m", "Hi", "--max-tokens", "4")
        return ran.returncode == 0 and ran.stdout.strip()

    assert wait_for(answered, "an answer")
    context = ssl.create_default_context(cafile=certificates.ca)
    with httpx.Client(base_url=own_stack.http, verify=context, headers=bearer(made)) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["secured"]
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(own_stack.http + "/livez", verify=ssl.create_default_context(cafile=certificates.other_ca))
    with ExitStack() as opened:
        port = int(own_stack.http.rpartition(":")[2])
        plain = opened.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        plain.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain.recv(1000)
    logs = "".join(log.read_text() for log in sorted((own_stack.data / "logs").glob("*.log")))
    assert logs
    for known in (made["key"][3:], own_stack.state["s3_secret_key"]):
        assert known not in logs
