"""Webhooks as they are given, shown and signed. The signatures are checked by code of others: the standard's example, and the
SDK of OpenAI, whose receivers verify them."""

import base64
import hashlib
import hmac
import json
import time

import msgspec
import openai
import pytest

from shared import webhooks
from shared.errors import BadRequest
from shared.webhooks import Webhook

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OTHER = "whsec_" + base64.b64encode(b"x" * 24).decode()


def refused(webhook: Webhook, private_hosts: str = "") -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        webhooks.check(webhook, private_hosts)
    return caught.value


def test_the_signature_is_that_of_the_standards_own_example() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    headers = webhooks.signed([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_a_rotated_secret_signs_next_to_the_new_one() -> None:
    headers = webhooks.signed([SECRET, OTHER], "evt_1", 17, b"{}")
    wanted = [hmac.new(key, b"evt_1.17.{}", hashlib.sha256).digest() for key in (KEY, b"x" * 24)]
    found = headers["webhook-signature"].split(" ")
    assert [base64.b64decode(each.removeprefix("v1,")) for each in found] == wanted


def test_openais_sdk_verifies_and_reads_an_event() -> None:
    now = time.time()
    body = webhooks.body("evt_7", "batch.completed", now, {"id": "batch_1"})
    headers = webhooks.signed([OTHER, SECRET], "evt_7", int(now), body)
    event = openai.OpenAI(api_key="none").webhooks.unwrap(body.decode(), headers, secret=SECRET)
    assert event.type == "batch.completed"
    assert (event.id, event.object, event.data.id, event.created_at) == ("evt_7", "event", "batch_1", int(now))
    with pytest.raises(openai.InvalidWebhookSignatureError):
        openai.OpenAI(api_key="none").webhooks.unwrap(body.decode() + " ", headers, secret=SECRET)


def test_a_body_has_the_standards_timestamp() -> None:
    body = json.loads(webhooks.body("evt_7", "job.failed", 1796068265.125, {"id": "7", "status": "failed"}))
    assert body["timestamp"] == "2026-11-30T19:51:05.125Z"
    assert body["data"] == {"id": "7", "status": "failed"}


def test_ids_are_stable_and_of_one_event_only() -> None:
    first = webhooks.event_id("acme", "job.completed", "7")
    assert first == webhooks.event_id("acme", "job.completed", "7") == "evt_dd1409a34dd0b23bdff763f9c80b8ee4"
    others = [("other", "job.completed", "7", 0), ("acme", "job.failed", "7", 0), ("acme", "job.completed", "8", 0)]
    others.append(("acme", "job.completed", "7", 1))
    assert len({first, *(webhooks.event_id(*each) for each in others)}) == 5


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/a?b=c",
        "http://example.com",
        "https://example.com:8443/",
        "https://xn--bcher-kva.example/",
        "http://1.1.1.1/x",
        "https://[2606:4700:4700::1111]/",
    ],
)
def test_targets_that_are_taken(url: str) -> None:
    webhooks.check(Webhook(url=url, secret=SECRET), "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "https://bücher.example/",
        "https://example.com/ x",
        "https://example.com/\r\nx: y",
        "https://example.com\\@127.0.0.1/",
        "https://user@example.com/",
        "https://user:pw@example.com/",
        "https://@example.com/",
        "https://example.com/#x",
        "https://example.com:0/",
        "https://example.com:22/",
        "https://example.com:25/",
        "https://example.com:65536/",
        "https://example.com:x/",
        "https://[::1/",
        "http://127.0.0.1/",
        "http://[::1]:8000/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
def test_targets_that_are_refused(url: str) -> None:
    assert refused(Webhook(url=url)).param == "webhook.url"


def test_hosts_that_may_be_private_are_named() -> None:
    here = Webhook(url="http://127.0.0.1:9000/")
    webhooks.check(here, "*")
    webhooks.check(here, "hooks.internal, 127.0.0.1")
    assert refused(here, "127.0.0.2,hooks.internal")


@pytest.mark.parametrize(
    "secret", ["", "whsec_", SECRET.removeprefix("whsec_"), "whsec_AAAA", "whsec_" + "A" * 100, "whsec_*"]
)
def test_a_secret_that_is_none_is_refused_and_not_repeated(secret: str) -> None:
    error = refused(Webhook(url="https://example.com", secret=secret))
    assert error.param == "webhook.secret"
    assert not secret.removeprefix("whsec_") or secret not in error.message


def test_what_is_shown_has_no_secret() -> None:
    webhook = Webhook(url="https://example.com/T0KEN", secret=SECRET, events=("job.failed",))
    assert msgspec.json.decode(msgspec.json.encode(webhooks.shown(webhook))) == {
        "url": "https://example.com/T0KEN",
        "events": ["job.failed"],
        "delivery": None,
    }
    assert SECRET not in repr(webhook)
    assert "T0KEN" not in repr(webhook)


def test_a_filter_names_types_that_there_are() -> None:
    webhook = Webhook(url="https://example.com", events=("job.failed",))
    assert webhook.wants("job.failed")
    assert not webhook.wants("job.completed")
    assert Webhook(url="https://example.com").wants("batch.expired")
    with pytest.raises(msgspec.ValidationError, match=r"events"):
        msgspec.json.decode(b'{"url": "https://example.com", "events": ["job.done"]}', type=Webhook)
