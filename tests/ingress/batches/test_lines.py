"""Lines out of a file, however it comes in pieces; and which batches run."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from ingress.batches.lines import RawLine, read_lines
from ingress.batches.record import BatchRecord
from ingress.batches.runner import choose
from ingress.files.store import FileRecord

LINE_BYTES_MAX = 50


class Pieces:
    """A file that is read in pieces of `size` bytes."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = data, size

    async def read(self, file: FileRecord, offset: int) -> bytes:
        return self._data[offset : offset + self._size]


def lines_of(data: bytes, size: int, offset: int = 0) -> list[RawLine]:
    file = FileRecord(id="f", tenant="t", filename="", purpose="batch", bytes=len(data), created_at=0)

    async def read() -> list[RawLine]:
        return [each async for each in read_lines(Pieces(data, size), file, LINE_BYTES_MAX, offset)]  # type: ignore[arg-type]

    return asyncio.run(read())


@settings(deadline=None)
@given(st.lists(st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"x"))), st.integers(1, 30), st.booleans())
def test_lines_are_those_of_the_file_and_each_says_where_the_next_begins(
    lines: list[bytes], size: int, ends: bool
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    found = lines_of(data, size)
    wanted = [(number, each) for number, each in enumerate(lines, 1) if each and not each.isspace()]
    if wanted and wanted[0][0] == 1:
        wanted[0] = (1, wanted[0][1].removeprefix(b"\xef\xbb\xbf"))
    assert [(each.number, each.data) for each in found] == [each for each in wanted if each[1]]
    for number, each in enumerate(found):
        assert [left.data for left in lines_of(data, size, each.end)] == [left.data for left in found[number + 1 :]]


def test_a_line_without_an_end_is_cut() -> None:
    found = lines_of(b"short\n" + b"x" * 1000, 20)
    assert [each.number for each in found] == [1, 2]
    assert LINE_BYTES_MAX < len(found[1].data) <= LINE_BYTES_MAX + 20


def test_what_comes_after_a_blank_that_is_too_long_is_not_left_out_without_a_word() -> None:
    found = lines_of(b" " * 1000 + b"\nlast", 20)
    assert [each.number for each in found] == [1]
    assert len(found[0].data) > LINE_BYTES_MAX


def test_blank_lines_do_not_keep_the_loop_from_others() -> None:
    data = b"\n" * 300_000
    file = FileRecord(id="f", tenant="t", filename="", purpose="batch", bytes=len(data), created_at=0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def read() -> None:
        other = asyncio.create_task(others())
        async for _ in read_lines(Pieces(data, len(data)), file, LINE_BYTES_MAX):  # type: ignore[arg-type]
            raise AssertionError("they are blank")
        other.cancel()

    asyncio.run(read())
    assert turns > 2


def batch(tenant: str, created_at: int) -> BatchRecord:
    return BatchRecord(
        id=f"b{created_at}",
        tenant=tenant,
        endpoint="/e",
        input_file_id="f",
        completion_window="24h",
        created_at=created_at,
        expires_at=created_at + 9,
    )


def test_tenants_take_turns_and_the_oldest_is_first() -> None:
    flood = [batch("loud", number) for number in range(10)]
    late = [batch("quiet", 20), batch("other", 30)]
    assert choose([*flood, *late], [], 5) == [("loud", "b0"), ("quiet", "b20"), ("other", "b30"), ("loud", "b1")]
    assert choose([*flood, *late], [("loud", "b0"), ("loud", "b1")], 3) == [("quiet", "b20")]
    assert choose(flood, [("loud", "b0")], 1) == []
    assert choose(flood, [], 1) == [("loud", "b0")]
    assert choose([], [], 4) == []


def test_batches_of_one_tenant_leave_a_place_to_others() -> None:
    flood = [batch("loud", number) for number in range(10)]
    running = choose(flood, [], 4)
    assert running == [("loud", "b0"), ("loud", "b1"), ("loud", "b2")]
    assert choose([*flood, batch("quiet", 20)], running, 4) == [("quiet", "b20")]
