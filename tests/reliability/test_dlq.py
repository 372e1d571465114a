"""Poisoned requests, and `headrace dlq`."""

import asyncio
import json
import os
import sys
from typing import Any

import msgspec
import pytest

from shared import subjects, wire
from shared.bus import Message
from shared.dispatch import Dispatcher, Stream
from shared.errors import Poisoned

from .conftest import Site

PROMPT = "a prompt that nobody needs to see"


async def headrace(site: Site, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "--data", site.settings.data_dir, *arguments),
        env=os.environ | {"HEADRACE_NATS_URL": site.settings.nats_url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def poison(site: Site, prompt: str) -> Stream:
    """A request that four workers answered and then died of, as its requester sees it."""
    dispatcher = Dispatcher(site.bus, msgspec.structs.replace(site.settings, silence_s=0.05, nak_hold_s=0.0))
    await dispatcher.start()
    request = wire.Request(
        wire.new_id(), site.model, "elsewhere", wire.Input(prompt=prompt), wire.Sampling(max_tokens=7)
    )
    stream = await dispatcher.submit(request, subjects.LOCAL_TENANT)
    for number in range(4):
        worker, claim = f"victim{number}", wire.new_id()

        async def say(item: Any, worker: str = worker) -> None:
            await site.bus.publish(dispatcher.address, wire.encode(wire.FromWorker(worker, [item])))

        attached: asyncio.Future[wire.Attach] = asyncio.get_running_loop().create_future()

        def on_control(message: Message, attached: asyncio.Future[wire.Attach] = attached) -> None:
            item = wire.decode_to_worker(message.data).items[0]
            if isinstance(item, wire.Attach) and not attached.done():
                attached.set_result(item)

        living = await site.bus.subscribe(subjects.worker_control(worker, subjects.INGRESS_OWNER), on_control)
        await say(wire.Accepted(request.rid, claim, stream.sequence, "", 0))
        attach = await attached
        await living.unsubscribe()
        await say(wire.Ok(request.rid, claim, attach.sid, stream.sequence, "", 60_000))
    with pytest.raises(Poisoned, match="victim0, victim1, victim2, victim3"):
        await stream.next(10)
    await site.until(lambda: buried(site))
    await dispatcher.close()
    await site.bus.delete_message(subjects.REQ_STREAM, stream.sequence)
    return stream


async def buried(site: Site) -> bool:
    subject = subjects.dead_letter(site.model, "elsewhere", subjects.LOCAL_TENANT)
    return await site.bus.next_message(subjects.DLQ_STREAM, subject, 1) is not None


def test_a_poisoned_request_is_listed_shown_without_its_prompt_and_run_again(site: Site) -> None:
    async def work() -> None:
        stream = await poison(site, PROMPT)
        garbage = subjects.dead_letter(site.model, "v", "someone")
        await site.bus.publish_durable(garbage, b"\xc1", {wire.HEADER_MSG_ID: "g1", wire.HEADER_REASON: "not msgpack"})

        status, output = await headrace(site, "dlq", "list", "--json")
        assert status == 0
        assert PROMPT not in output
        letters = {letter["reason"]: letter for letter in json.loads(output) if letter["model"] == site.model}
        poisoned = next(letter for reason, letter in letters.items() if "ended 4 workers" in reason)
        assert (poisoned["rid"], poisoned["tenant"]) == (stream.rid, subjects.LOCAL_TENANT)
        assert poisoned["headers"][wire.HEADER_REPLY].startswith("tok.ingress.")
        assert letters["not msgpack"]["rid"] is None

        seq = str(poisoned["seq"])
        for arguments, shown in (((), False), (("--body",), True), (("--json", "--body"), True)):
            status, output = await headrace(site, "dlq", "show", seq, *arguments)
            assert status == 0
            assert (PROMPT in output) is shown
            assert stream.rid in output

        status, output = await headrace(site, "dlq", "requeue", str(letters["not msgpack"]["seq"]))
        assert (status, "not a request" in output) == (1, True)
        status, output = await headrace(site, "dlq", "show", "999999")
        assert (status, "999999" in output) == (1, True)

        # what it died of has been mended: the same request, now of a version that is served
        message = await site.bus.get_message(subjects.DLQ_STREAM, poisoned["seq"])
        assert message is not None
        request = msgspec.structs.replace(wire.decode_request(message.data, message.headers), version="v")
        mended = await site.bus.publish_durable(
            subjects.dead_letter(site.model, "v", subjects.LOCAL_TENANT),
            wire.encode(request),
            {wire.HEADER_MSG_ID: "mended", wire.HEADER_REASON: "mended"},
        )
        status, output = await headrace(site, "dlq", "requeue", str(mended), "--body")
        assert status == 0
        text, result = output.splitlines()
        assert len(text.split()) == 7
        assert "complete, 7 tokens, 1 claims" in result
        assert await site.bus.get_message(subjects.DLQ_STREAM, mended) is None
        await site.idle()

    site.run(work())
