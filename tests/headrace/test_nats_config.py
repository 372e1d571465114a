"""`headrace nats-config` on a real server: a tenant that publishes for itself can do so, and nothing to anybody else."""

import asyncio
import base64
import re
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from msgspec.structs import replace
from nats.aio.client import Client
from nats.aio.msg import Msg
from typer.testing import CliRunner

from headrace.cli import app
from headrace.nats_config import write_accounts
from shared import subjects
from shared.bus import Bus
from shared.errors import Unavailable
from shared.settings import Settings, SettingsError

ME, OTHER = "acme", "other"
INGRESS = subjects.INGRESS_OWNER
MARK = b"from acme"
WORKER = "w0"

# Every subject that Headrace's processes listen on or send to, by the function that spells it: for whom it may be.
FAMILIES: dict[str, Callable[[str], str]] = {
    "request": lambda owner: subjects.request("m", "v", subjects.LANE_FAIR, owner),
    "worker_control": lambda owner: subjects.worker_control(WORKER, owner),
    "attach_broadcast": lambda owner: subjects.attach_broadcast("m", "v", owner),
    "find": subjects.find,
    "cancel": subjects.cancel,
    "wake": lambda _: subjects.wake("m", "v"),
    "worker_drain": lambda _: subjects.worker_drain(WORKER),
    "worker_assign": lambda _: subjects.worker_assign(WORKER),
    "frame_address": lambda owner: subjects.frame_address(owner, "client"),
    "dead_letter": lambda owner: subjects.dead_letter("m", "v", owner),
    "dead_letter_of": lambda owner: subjects.dead_letter_of(f"q.m.v.fast.{owner}"),
    "usage": subjects.usage,
    "job": lambda owner: subjects.job("m", "v", owner),
    "checkpoint": lambda owner: subjects.checkpoint(owner, "0"),
    "result": lambda owner: subjects.result(owner, "0"),
    "audit": lambda _: subjects.audit("key.revoke"),
    "services_as": lambda owner: subjects.services_as(owner).replace(">", "route"),  # as it arrives
}
MAY_SEND = {"request", "worker_control", "attach_broadcast", "find", "cancel", "wake"}  # and of those its own only
NO_SUBJECTS = {  # filters of the above, names, and what reads them
    *("encode_token", "decode_token", "key", "names_of", "consumer", "fair_consumer", "is_fair", "requests_by_name"),
    *(
        "results_of_job",
        "results_of_tenant",
        "jobs_of_tenant",
        "kept_of_tenant",
        "dead_letters_of_tenant",
        "is_dead_letter",
        "is_job",
    ),
    *("reads_json", "asked_service", "discovery", "service_infer", "service_jobs"),
    *("jobs_of_version", "job_consumer", "place_of_job"),
    "place_of_result",
    *("requests_of_lane", "requests_of_version", "requests_mapped", "place_of_request", "version_of_request"),
    *(
        "tenant_of_request",
        "tenant_of_usage",
        "version_of_wake",
        "may_have_frames",
        "speaks_for",
        "sent_by",
        "frames_of",
    ),
}
BUCKETS = [value for name, value in vars(subjects).items() if name.endswith("_BUCKET")]
STREAMS = [value for name, value in vars(subjects).items() if name.endswith("_STREAM")]
STREAMS += [f"KV_{bucket}" for bucket in BUCKETS]


def allowed(name: str, owner: str) -> bool:
    return name in MAY_SEND and (owner == ME or name == "wake")


def forbidden() -> Iterator[str]:
    """What a tenant must not publish to."""
    for name, example in FAMILIES.items():
        yield from {example(owner) for owner in (ME, OTHER, INGRESS) if not allowed(name, owner)}
    yield from (subjects.request("m", "v", subjects.LANE_FAST, owner) for owner in (ME, OTHER))
    yield from ("q.m.v.fair.acme.x", "q.m.fair.acme", "q.m.v.fair.acm", "q.m.v.FAIR.acme", f"ctl.worker.{WORKER}.items")
    for call in (
        "STREAM.INFO",
        "STREAM.DELETE",
        "STREAM.PURGE",
        "STREAM.UPDATE",
        "STREAM.MSG.GET",
        "STREAM.MSG.DELETE",
    ):
        yield from (f"$JS.API.{call}.{stream}" for stream in STREAMS)
    yield from (f"$JS.API.DIRECT.GET.{stream}" for stream in STREAMS)
    yield from (f"$JS.API.CONSUMER.{call}.REQ.fast-0" for call in ("INFO", "DELETE", "MSG.NEXT", "CREATE", "PAUSE"))
    yield from ("$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.CREATE.MINE")
    yield from ("$JS.API.CONSUMER.LIST.REQ", "$JS.API.META.LEADER.STEPDOWN", "$JS.ACK.REQ.fast-0.1.1.1.1.0", "$JS.FC.x")
    yield from (f"$KV.{bucket}.acme" for bucket in BUCKETS)
    yield from ("$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.headrace.CONNZ", "$SYS.ACCOUNT.headrace.CONNECT", "$SRV.PING")
    yield from ("_INBOX.somebody.1", "_R_.abc.def", "_GR_.abc.def", "$O.x.C.y", "$NRG.x", "anything")


UNHEARD = [
    *(
        ">",
        "*.>",
        "q.>",
        "q.*.*.fair.acme",
        "ctl.>",
        "ctl.requests.find.*",
        "wake.*.*",
        "dlq.>",
        "usage.>",
        "usage.acme",
    ),
    *("j.>", "res.>", "res.acme.>"),
    *("audit.>", "tok.>", "tok.*.*", "tok.other.*", "tok.ingress.*", "$KV.>", "$JS.>", "$JS.API.>", "$JS.ACK.>"),
    *("$JS.EVENT.>", "$SYS.>", "_R_.>", "$SRV.>", "headrace.>"),
]


class User:
    """A client of the plain library, with all that it is told."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.client = settings, Client()
        self.errors: asyncio.Queue[str] = asyncio.Queue()
        self.seen: list[Msg] = []
        self.closed = asyncio.Event()

    async def connect(self) -> "User":
        async def on_error(error: Exception) -> None:
            self.errors.put_nowait(str(error).lower())

        async def on_closed() -> None:
            self.closed.set()

        options: dict[str, Any] = {"nkeys_seed": self.settings.nats_nkey} if self.settings.nats_nkey else {}
        try:
            await self.client.connect(
                self.settings.nats_url, error_cb=on_error, closed_cb=on_closed, allow_reconnect=False, **options
            )
        except nats.errors.Error:
            await self.client.close()
            raise
        return self

    async def refused(self) -> str:
        """The next error that the server tells of."""
        async with asyncio.timeout(10):
            return await self.errors.get()

    async def listen(self, *wanted: str) -> None:
        async def on_message(message: Msg) -> None:
            self.seen.append(message)

        for subject in wanted:
            await self.client.subscribe(subject, cb=on_message)
        await self.sent()

    async def send(self, subject: str, data: bytes = MARK, reply: str = "", **headers: str) -> None:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.client.publish(subject, data, reply=reply, headers=given or None)

    async def sent(self) -> None:
        """Returns when the server has taken all that was sent. The library's ping overtakes what it still holds."""
        await self.client._flush_pending(force_flush=True)
        await self.client.flush()

    async def told(self) -> list[Msg]:
        """All that the server has sent until now."""
        await self.sent()
        for subscription in list(self.client._subs.values()):
            await subscription._pending_queue.join()
        return self.seen

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the server does in its own time: acks."""
        async with asyncio.timeout(10):
            while not condition():
                await self.told()


@asynccontextmanager
async def users(server: Any) -> AsyncIterator[tuple[User, User, User]]:
    """Headrace itself, which hears everything in its account, and two tenants."""
    found = [await User(server.settings(name)).connect() for name in (None, ME, OTHER)]
    own, me, other = found
    bus = await Bus.connect(server.settings(), "test")
    await bus.ensure()
    await bus.purge(subjects.REQ_STREAM, subjects.REQ_SUBJECTS)
    await bus.close()
    await own.listen(">")
    try:
        yield own, me, other
    finally:
        for user in found:
            await user.client.close()


def meet(server: Any, work: Callable[[User, User, User], Awaitable[None]]) -> None:
    async def main() -> None:
        async with users(server) as (own, me, other):
            await work(own, me, other)

    asyncio.run(main())


@pytest.fixture(scope="module")
def accounts_alone(tmp_path_factory: pytest.TempPathFactory, guarded_nats: Any) -> Iterator[Any]:
    """The server as it would be without the permissions that come on top."""
    server = type(guarded_nats)(tmp_path_factory.mktemp("accounts-alone"))
    server.kill()
    config = server.directory / "accounts.conf"
    text, count = re.subn(r"permissions \{.*?\n      \}\n", "", config.read_text(), flags=re.DOTALL)
    assert count == 2
    config.write_text(text)
    server.start()
    yield server
    server.kill()


def test_every_subject_is_known_to_these_tests() -> None:
    functions = {
        name
        for name, value in vars(subjects).items()
        if callable(value) and value.__module__ == subjects.__name__ and not name.startswith("_")
    }
    assert functions == set(FAMILIES) | NO_SUBJECTS
    assert set(FAMILIES) & NO_SUBJECTS == set()


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    return len(wanted) == len(given) and all(a in ("*", b) for a, b in zip(wanted, given, strict=True))


def test_what_may_be_sent_is_what_these_tests_say() -> None:
    for name, example in FAMILIES.items():
        for owner in (ME, OTHER, INGRESS):
            may = any(matches(each, example(owner)) for each in subjects.sent_by(ME))
            assert may == allowed(name, owner), (name, owner)


def test_what_a_tenant_may_send_arrives_and_is_answered(guarded_nats: Any) -> None:
    async def work(own: User, me: User, other: User) -> None:
        sent = [FAMILIES[name](ME) for name in MAY_SEND] + ["q.m.=40stable.fair.acme"]
        await me.listen("_INBOX.me.*")
        await other.listen("_INBOX.>")
        for subject in sent:
            await me.send(subject, reply="_INBOX.me.1")
        await me.sent()
        heard = {message.subject: message for message in await own.told() if message.data == MARK}
        assert set(heard) == set(sent)
        await own.send(heard[subjects.find(ME)].reply, b"here")
        await own.sent()
        await me.until(lambda: len(me.seen) == 3)
        answers = [message.data for message in me.seen]
        assert b"here" in answers
        assert sum(b'"stream":"REQ"' in answer for answer in answers) == 2  # the acks of what was stored
        assert await other.told() == []
        assert me.errors.empty()

    meet(guarded_nats, work)


def test_what_a_tenant_asks_of_a_service_arrives_as_its_own_and_is_answered_more_than_once(guarded_nats: Any) -> None:
    async def work(own: User, me: User, other: User) -> None:
        await me.listen("_INBOX.me.*")
        await other.listen("_INBOX.>", "tok.other.*")
        for subject in ("headrace.infer.m", subjects.SERVICE_ROUTE, subjects.service_jobs("show")):
            await me.send(subject, reply="_INBOX.me.1")
        await me.send(subjects.SERVICE_ROUTE, reply="tok.other.x")
        await me.sent()
        heard = [message for message in await own.told() if message.data == MARK]
        assert [message.subject for message in heard] == [
            "as.acme.headrace.infer.m",
            "as.acme.headrace.route",
            "as.acme.headrace.jobs.show",
            "as.acme.headrace.route",
        ]
        for message in heard:
            assert subjects.asked_service(message.subject)[0] == ME
            for number in range(3):
                await own.send(message.reply, b"%d" % number)
        await own.sent()
        await me.until(lambda: len(me.seen) == 9)
        assert [message.data for message in me.seen] == [b"0", b"1", b"2"] * 3
        assert await other.told() == []
        assert me.errors.empty()

    meet(guarded_nats, work)


def test_what_a_tenant_may_not_send_is_refused_and_reaches_nobody(guarded_nats: Any) -> None:
    async def work(own: User, me: User, _: User) -> None:
        for subject in forbidden():
            await me.send(subject, reply="_INBOX.me.1")
            assert await me.refused() == f'nats: permissions violation for publish to "{subject.lower()}"'
        assert [message.subject for message in await own.told() if message.data == MARK] == []

    meet(guarded_nats, work)


def test_accounts_alone_keep_it_from_everybody(accounts_alone: Any) -> None:
    async def work(own: User, me: User, other: User) -> None:
        await other.listen(">")
        await me.listen("_INBOX.>")
        for subject in forbidden():
            await me.send(subject, reply="_INBOX.me.1")
        await me.sent()
        assert [message.subject for message in await own.told() if message.data == MARK] == []
        assert await other.told() == []
        assert not [message for message in await me.told() if b'"config"' in message.data or b'"seq"' in message.data]
        await me.listen(*UNHEARD)
        await own.send("tok.other.x", b"secret")
        await own.send("tok.ingress.x", b"secret")
        await own.send("$KV.tenants.other", b"secret")
        await own.send("ctl.requests.find.other", b"secret")
        await own.sent()
        assert [message.subject for message in await me.told() if message.data == b"secret"] == []

    meet(accounts_alone, work)


@pytest.mark.parametrize("server", ["guarded_nats", "accounts_alone"])
def test_no_answer_goes_where_its_asker_could_not_send(server: str, request: pytest.FixtureRequest) -> None:
    """The server answers a publish at its reply subject, whatever that is: within one account it would write there."""

    async def work(own: User, me: User, other: User) -> None:
        await other.listen(">" if server == "accounts_alone" else "_INBOX.>", "tok.other.*")
        places = [*forbidden()]
        for place in places:
            await me.send("q.m.v.fair.acme", reply=place)
        await me.send("q.m.v.fair.acme", Nats_Trace_Dest=subjects.worker_drain(WORKER))
        await me.listen("_INBOX.me.*")
        await me.send("q.m.v.fair.acme", reply="_INBOX.me.1", Nats_Rollup="all")
        await me.send("q.m.v.fair.acme", reply="_INBOX.me.2")
        await me.until(lambda: any(message.subject == "_INBOX.me.2" for message in me.seen))  # all before is stored
        heard = await own.told()
        assert [message.subject for message in heard if message.subject in places] == []
        stored = {message.subject for message in heard if message.data == MARK}
        assert stored == {"q.m.v.fair.acme"}
        assert await other.told() == []
        bus = await Bus.connect(own.settings, "test")
        published = len([message for message in heard if message.data == MARK])
        assert len(places) - 5 < published - 3 <= len(places)  # the server itself refuses replies to some of them
        assert (await bus.stream_info(subjects.REQ_STREAM)).messages == published - 1  # not what asked for a rollup
        assert await bus.kv_get("tenants", "acme") is None
        await bus.close()

    meet(request.getfixturevalue(server), work)


def test_who_has_no_key_is_told_why_there_is_no_connection(guarded_nats: Any) -> None:
    with pytest.raises(Unavailable, match="Authorization Violation"):
        asyncio.run(Bus.connect(Settings(nats_url=guarded_nats.url), "test", wait_s=1))


def test_what_a_tenant_may_not_hear_is_refused(guarded_nats: Any) -> None:
    async def work(own: User, me: User, other: User) -> None:
        for subject in UNHEARD:
            await me.listen(subject)
            assert await me.refused() == f'nats: permissions violation for subscription to "{subject.lower()}"'
        await me.listen("tok.acme.*", "_INBOX.>")
        await other.listen("tok.other.*", "_INBOX.>")
        for owner in (ME, OTHER, INGRESS):
            await own.send(subjects.frame_address(owner, "client"), owner.encode())
        await own.send("_INBOX.somebody.1", b"secret")
        await own.sent()
        assert [message.data for message in await me.told()] == [b"acme"]
        assert [message.data for message in await other.told()] == [b"other"]

    meet(guarded_nats, work)


def test_nobody_listening_is_told_across_accounts_in_both_directions(guarded_nats: Any) -> None:
    """What requesters and workers know of each other's end."""

    async def work(own: User, me: User, _: User) -> None:
        for subscription in list(own.client._subs.values()):  # it would be who listens
            await subscription.unsubscribe()
        await own.listen("_INBOX.own.*")
        address = "tok.acme.client"
        await own.send(address, b"", reply="_INBOX.own.1")
        await own.told()
        await me.listen(address, "_INBOX.me.*")
        await own.send(address, b"frame", reply="_INBOX.own.2")
        told = await own.told()
        assert [(message.subject, (message.headers or {})["Status"]) for message in told] == [("_INBOX.own.1", "503")]
        assert [message.data for message in await me.told()] == [b"frame"]
        me.seen.clear()
        await me.send(subjects.worker_control("gone", ME), reply="_INBOX.me.1")
        assert [(message.headers or {})["Status"] for message in await me.told()] == ["503"]

    meet(guarded_nats, work)


def test_without_a_key_nobody_comes_in(guarded_nats: Any) -> None:
    async def main() -> None:
        for url in (guarded_nats.url, guarded_nats.url.replace("//", "//headrace:headrace@")):
            with pytest.raises(nats.errors.Error, match="Authorization Violation"):
                await User(Settings(nats_url=url)).connect()

    asyncio.run(main())
    assert "no_auth_user" not in (guarded_nats.directory / "accounts.conf").read_text()


def test_a_tenant_comes_and_goes_with_its_key(own_guarded_nats: Any) -> None:
    server = own_guarded_nats

    async def main() -> None:
        me, other = [await User(server.settings(name)).connect() for name in (ME, OTHER)]
        before = server.key(OTHER).read_bytes()
        gone = server.key(ME).rename(server.directory / "gone.nk")
        server.configure("--tenant", "new")
        server.signal(signal.SIGHUP)
        await asyncio.wait_for(me.closed.wait(), 10)
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await User(replace(me.settings, nats_nkey=str(gone))).connect()
        new = await User(server.settings("new")).connect()
        await new.send("q.m.v.fair.new", reply="_INBOX.new.1")
        await other.send("q.m.v.fair.new")
        assert await other.refused() == 'nats: permissions violation for publish to "q.m.v.fair.new"'
        assert server.key(OTHER).read_bytes() == before
        for user in (other, new):
            await user.client.close()

    asyncio.run(main())


def test_keys_are_for_their_owner_and_nowhere_else(guarded_nats: Any) -> None:
    paths = [guarded_nats.key(name) for name in (None, ME, OTHER)]
    seeds = {path.read_text().strip() for path in paths}
    assert len(seeds) == 3
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().startswith("SU")
    others = [path for path in guarded_nats.directory.glob("*") if path.is_file() and path not in paths]
    assert {"accounts.conf", "nats.conf", "server.log"} <= {path.name for path in others}
    for text in [guarded_nats.said, *(path.read_text() for path in others)]:
        assert not any(seed in text for seed in seeds)


def test_routes_by_name_are_mapped_for_tenants(own_guarded_nats: Any) -> None:
    (own_guarded_nats.directory / "mapping.conf").write_text(
        'mappings: { "q.m.=40.*.*": [ { destination: "q.m.v7.$1.$2", weight: 100% } ] }\n'
    )
    own_guarded_nats.configure()
    own_guarded_nats.kill()
    own_guarded_nats.start()

    async def work(own: User, me: User, _: User) -> None:
        await me.send("q.m.=40.fair.acme")
        await me.sent()
        assert [message.subject for message in await own.told() if message.data == MARK] == ["q.m.v7.fair.acme"]

    meet(own_guarded_nats, work)


def test_the_file_for_a_whole_server_has_tls_and_its_own_place(tmp_path: Path, certificates: Any) -> None:
    cert, key = certificates.server
    options = ["--listen", "0.0.0.0:4222", "--tls-cert", cert, "--tls-key", key, "--store", str(tmp_path / "js")]
    assert CliRunner().invoke(app, ["nats-config", str(tmp_path / "d"), *options]).exit_code == 0
    text = (tmp_path / "d" / "nats.conf").read_text()
    assert f'tls {{ cert_file: "{cert}", key_file: "{key}" }}' in text
    assert f'store_dir: "{tmp_path / "js"}"' in text


@pytest.mark.parametrize(
    "options",
    [
        ["--tenant", "ingress"],
        ["--tenant", "local"],
        ["--tenant", "a/b"],
        ["--tenant", ""],
        ["--listen", "4222"],
        ["--listen", 'x"\n:1'],
        ["--listen", "a:70000"],
        ["--tls-cert", "a"],
        ["--listen", "a:1", "--tls-cert", "a"],
    ],
)
def test_what_does_not_fit_is_refused_and_writes_nothing(options: list[str], tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["nats-config", str(tmp_path / "d"), *options])
    assert ran.exit_code == 2
    assert not (tmp_path / "d").exists()


def test_every_tenant_can_have_a_key_however_long_its_name(tmp_path: Path) -> None:
    """A character of a name may be nine of its token, and a file's name has 255."""
    names = ["é" * 64, "é" * 63, "x" * 128, "a.b"]
    made = write_accounts(tmp_path, names)
    assert write_accounts(tmp_path, names) == []
    accounts = (tmp_path / "accounts.conf").read_text()
    for name, path in zip(names, made[1:], strict=True):
        assert f'"tenant/{subjects.encode_token(name)}"' in accounts
        assert path.stat().st_mode & 0o777 == 0o600
    made[1].unlink()
    write_accounts(tmp_path, [])
    assert f'"tenant/{subjects.encode_token(names[0])}"' not in (tmp_path / "accounts.conf").read_text()


def test_a_key_that_lies_about_is_nobodys(tmp_path: Path) -> None:
    [_, key] = write_accounts(tmp_path, ["acme"])
    (key.parent / "old").mkdir()
    key = key.rename(key.parent / "old" / key.name)
    write_accounts(tmp_path, [])
    assert "acme" not in (tmp_path / "accounts.conf").read_text()
    key = key.rename(tmp_path / "tenants" / "acme (copy).nk")
    with pytest.raises(SettingsError, match=re.escape(f"{key} is named after no tenant")):
        write_accounts(tmp_path, [])


def test_a_key_that_is_none_is_named_and_not_told(tmp_path: Path) -> None:
    path = tmp_path / "key.nk"
    public = base64.b32encode(b"\0" * 35).decode()
    for text in ("", "SUSECRET", public, "\xff"):
        path.write_text(text, "latin-1")
        with pytest.raises(SettingsError, match=re.escape(str(path))) as raised:
            Bus(Settings(nats_nkey=str(path)), "test")
        assert not text or text not in str(raised.value)
    with pytest.raises(SettingsError, match="No such file"):
        Bus(Settings(nats_nkey=str(tmp_path / "none")), "test")


def test_a_password_in_the_url_is_not_shown() -> None:
    settings = Settings(nats_url="nats://me:p/a@ss@a:1,tls://token@b:2,nats://c:3")
    assert settings.nats_shown == "nats://...@a:1,tls://...@b:2,nats://c:3"
