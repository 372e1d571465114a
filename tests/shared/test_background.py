import asyncio

from shared.background import Background, end


async def forever(ends: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ends.append("over")


def test_what_is_done_beside_is_held_until_it_is_over() -> None:
    async def main() -> None:
        tasks, go_on = Background(), asyncio.Event()
        task = tasks.do(go_on.wait())
        assert len(tasks) == 1
        await tasks.finish(0.001)
        assert not task.done()
        go_on.set()
        await tasks.finish()
        assert (task.result(), len(tasks)) == (True, 0)
        await tasks.finish()

    asyncio.run(main())


def test_the_end_is_waited_for_and_an_error_is_an_end_like_any_other() -> None:
    async def broken() -> None:
        raise ValueError

    async def main() -> None:
        ends: list[str] = []
        tasks = Background()
        tasks.do(forever(ends))
        tasks.do(broken())
        alone = asyncio.create_task(forever(ends))
        await asyncio.sleep(0)
        await tasks.close()
        await end(None, alone)
        assert ends == ["over"] * 2
        await end(alone)

    asyncio.run(main())
