"""The object store in AWS's shapes: the bucket in the host's name, and temporary keys with a session token, against moto."""

import hashlib
import json
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from msgspec.structs import replace

from headrace.stack import ports
from shared.errors import NotFound, ObjectsUnavailable
from shared.lifeline import die_with_parent
from shared.objects import ObjectStore
from shared.settings import MIB, Settings

ROLE = "arn:aws:iam::123456789012:role/headrace"
READY_WITHIN_S = 60.0
EVERYTHING = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]})


class Moto:
    """A moto server, and what is asked of it beside S3."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def call(self, service: str, **parameters: str) -> str:
        """An action of one of AWS's services, without a signature that anybody checks."""
        scope = f"AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/{service}/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"authorization": scope, "content-type": "application/x-www-form-urlencoded"}
        return httpx.post(self.url, content=urlencode(parameters), headers=headers).raise_for_status().text

    def check_signatures(self, checks: bool) -> None:
        httpx.post(f"{self.url}/moto-api/reset-auth", content=b"0" if checks else b"inf").raise_for_status()


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    port = ports.free_ports(1)[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
    )
    moto = Moto(port)
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            httpx.get(f"{moto.url}/moto-api/").raise_for_status()
            break
        except httpx.TransportError:
            assert process.poll() is None
            assert time.monotonic() < deadline, "moto does not answer"
            time.sleep(0.05)
    yield moto
    process.kill()
    process.wait()


@pytest.fixture
def temporary(moto: Moto) -> Iterator[Settings]:
    """Settings with the keys and the session token of an assumed role; from here on signatures are checked."""
    name = ROLE.rpartition("/")[2]
    moto.call("iam", Action="CreateRole", Version="2010-05-08", RoleName=name, AssumeRolePolicyDocument=EVERYTHING)
    policy = {"RoleName": name, "PolicyName": "all", "PolicyDocument": EVERYTHING}
    moto.call("iam", Action="PutRolePolicy", Version="2010-05-08", **policy)
    assumed = moto.call("sts", Action="AssumeRole", Version="2011-06-15", RoleArn=ROLE, RoleSessionName="test")
    keys = {
        tag: re.search(f"<{tag}>([^<]+)</{tag}>", assumed) for tag in ("AccessKeyId", "SecretAccessKey", "SessionToken")
    }
    access_key, secret_key, token = (found[1] for found in keys.values() if found is not None)
    moto.check_signatures(True)
    yield Settings(
        s3_endpoint=moto.url,
        s3_bucket=f"b-{secrets.token_hex(4)}",
        s3_access_key=access_key,
        s3_secret_key=secret_key,
        s3_session_token=token,
    )
    moto.check_signatures(False)


def exercise(store: ObjectStore, directory: Path) -> None:
    """Every operation once."""
    store.ensure_bucket()
    store.ensure_bucket()
    path = directory / "file"
    data = secrets.token_bytes(MIB)
    path.write_bytes(data * 17)  # in two parts
    digest = hashlib.sha256(data * 17).hexdigest()
    store.put("models/a=20b/v1/manifest.json", b"{}")
    store.put_file("blobs/x", path, 17 * MIB, digest)
    assert store.get("models/a=20b/v1/manifest.json") == b"{}"
    assert b"".join(store.read_range("blobs/x", 3 * MIB, 2 * MIB)) == data * 2
    assert list(store.read_range("blobs/x", 18 * MIB, MIB)) == []
    store.touch("blobs/x")
    assert store.stat("blobs/x").size == 17 * MIB
    assert [one.key for one in store.list("")] == ["blobs/x", "models/a=20b/v1/manifest.json"]
    store.remove("blobs/x")
    with pytest.raises(NotFound):
        store.stat("blobs/x")


def test_the_bucket_in_the_hosts_name(moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, port = f"b-{secrets.token_hex(4)}", int(moto.url.rpartition(":")[2])
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def everywhere_is_moto(host: Any, _port: Any, *rest: Any, **named: Any) -> Any:
        asked.append(str(host))
        return resolve("127.0.0.1", port, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", everywhere_is_moto)
    settings = Settings(
        s3_endpoint="http://s3.amazonaws.com", s3_bucket=bucket, s3_access_key="any", s3_secret_key="any"
    )
    exercise(ObjectStore(settings), tmp_path)  # on AWS by itself
    assert f"{bucket}.s3.us-east-1.amazonaws.com" in asked
    assert all(host.endswith(".amazonaws.com") for host in asked)
    del asked[:]
    elsewhere = replace(settings, s3_endpoint=f"http://localhost:{port}", s3_bucket=f"b-{secrets.token_hex(4)}")
    store = ObjectStore(replace(elsewhere, s3_virtual_host=True))
    exercise(store, tmp_path)
    assert f"{store.bucket}.localhost" in asked
    assert set(asked) <= {"localhost", f"{store.bucket}.localhost"}  # a bucket is made at the bare host


def test_temporary_keys_need_their_session_token(temporary: Settings, tmp_path: Path) -> None:
    exercise(ObjectStore(temporary), tmp_path)
    with pytest.raises(ObjectsUnavailable, match="refuses the access key") as caught:
        ObjectStore(replace(temporary, s3_session_token="")).get("x")
    assert temporary.s3_secret_key not in str(caught.value)
    with pytest.raises(ObjectsUnavailable, match="refuses the access key"):
        ObjectStore(replace(temporary, s3_secret_key="0" * 40)).get("x")
