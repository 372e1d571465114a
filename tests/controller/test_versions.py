"""The life of version records against a real nats-server."""

import threading
import time
from typing import Any

from msgspec.structs import replace

from shared import records, subjects
from shared.errors import NotFound, ObjectsUnavailable
from shared.records import Version


def test_a_registered_version_gets_its_consumer_and_becomes_available(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.register("org/chat", "v1.0")  # before there is a controller
        await bench.start()
        await bench.available("org/chat", "v1.0")
        await bench.request("org/chat", "v1.0", wake=False)

        async def counted() -> bool:  # by the consumer, some time after the stream has stored it
            return (await bench.consumer("org/chat", "v1.0")).num_pending == 1

        await bench.until(counted)
        assert bench.verified == []  # a simulated engine has no files

    run_bench(work)


def test_files_are_verified_first_and_an_object_store_that_is_away_is_waited_for(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        tries: list[Version] = []

        def verify(record: Version) -> None:
            tries.append(record)
            if len(tries) == 1:
                raise ObjectsUnavailable("the object store cannot be reached")

        bench.verify = verify
        await bench.start()
        await bench.register("chat", source="s3")

        async def shown() -> bool:
            record = await bench.record("chat")
            return (record.state, record.reason) == ("registered", "the object store cannot be reached")

        await bench.until(shown)
        await bench.available("chat")
        assert (await bench.record("chat")).reason == ""
        assert [record.model for record in tries] == ["chat", "chat"]

    run_bench(work)


def test_a_version_without_its_files_is_failed_with_the_reason(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        def verify(record: Version) -> None:
            raise NotFound(f"no manifest of {record.model}")

        bench.verify = verify
        await bench.start()
        await bench.register("chat", source="s3")
        await bench.until(lambda: bench.state_is("chat", "failed"))
        assert (await bench.record("chat")).reason == "no manifest of chat"

    run_bench(work)


def test_a_state_that_somebody_wrote_meanwhile_is_not_undone(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        looked = False

        def verify(record: Version) -> None:
            nonlocal looked
            looked = True
            release.wait(10)

        release = threading.Event()
        bench.verify = verify
        await bench.start()
        await bench.register("chat", source="s3")
        await bench.until(lambda: looked)
        await bench.set_state("chat", "retired")
        release.set()
        await bench.register("other")
        await bench.available("other")
        await bench.until(lambda: not bench.controller._versions._tasks)
        assert await bench.state_is("chat", "retired")

    run_bench(work)


def test_a_consumer_that_is_lost_is_made_again(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat", wake=False)
        await bench.bus.delete_consumer("chat", "v1", subjects.LANE_FAST)

        async def restored() -> bool:
            info = await bench.consumer("chat")
            return info is not None and info.num_pending == 1

        await bench.until(restored)

    run_bench(work)


def test_a_deleted_record_takes_queue_and_consumer_with_it_and_the_name_can_come_back(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", max_replicas=0)
        await bench.available("chat")
        await bench.request("chat")
        await bench.bus.kv_delete(subjects.MODELS_BUCKET, subjects.key("chat", "v1"))

        async def cleaned() -> bool:
            return await bench.consumer("chat") is None

        await bench.until(cleaned)
        assert (await bench.bus.stream_info(subjects.REQ_STREAM)).messages == 0
        await bench.register("chat")
        await bench.available("chat")
        assert await bench.consumer("chat") is not None

    run_bench(work)


def test_what_is_left_in_a_failed_versions_queue_is_purged_only_after_a_while(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", max_replicas=0)
        await bench.available("chat")
        await bench.set_state("chat", "failed")
        await bench.until(lambda: bench.controller.observer.records["chat", "v1"].state == "failed")
        await bench.request("chat")
        failed_at = bench.controller.observer.state_since["chat", "v1"]

        async def purged() -> bool:
            return (await bench.consumer("chat")).num_pending == 0

        await bench.until(purged)
        assert time.monotonic() - failed_at >= bench.settings.purge_after_s
        await bench.set_state("chat", "registered")  # pushed again
        await bench.available("chat")

    run_bench(work)


def test_the_name_of_a_version_that_was_removed_is_free_after_a_while(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        for model, removed in (("old", 100), ("new", 0)):
            await bench.register(model)
            await bench.available(model)
            record = replace(await bench.record(model), state="retired", retired=int(time.time()) - removed)
            await bench.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(model, "v1"), records.encode(record))

        async def forgotten() -> bool:
            return await bench.bus.kv_get(subjects.MODELS_BUCKET, subjects.key("old", "v1")) is None

        async def cleaned(model: str) -> bool:
            return await bench.consumer(model) is None

        await bench.until(forgotten)
        await bench.until(lambda: cleaned("new"))
        assert await bench.consumer("old") is None
        assert await bench.state_is("new", "retired")

    run_bench(work, retired_kept_s=60.0)
