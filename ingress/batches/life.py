"""The life of a batch. Pure: a record and what happened in, the next record out; `now` in unix seconds.

validating -> in_progress -> finalizing -> completed | failed | expired
     |             |
     |             +-> cancelling -> cancelled
     +-> failed (the input is no batch), expired, cancelling
"""

from msgspec.structs import replace

from ingress.batches.record import BatchRecord, End, Problem, Segment
from shared.errors import BatchState

ALL_FAILED = "all_requests_failed"


def validated(record: BatchRecord, lines: int, models: tuple[str, ...], now: int) -> BatchRecord:
    """The input is a batch of so many lines, which name these models."""
    assert record.status == "validating", record.status
    assert lines > 0
    return replace(record, status="in_progress", in_progress_at=now, total=lines, models=models or record.models)


def rejected(record: BatchRecord, problems: list[Problem], now: int) -> BatchRecord:
    """The input is none: nothing of it has run."""
    assert record.status == "validating", record.status
    assert problems
    return replace(record, status="failed", failed_at=now, errors=tuple(problems), end="failed")


def cancelled(record: BatchRecord, now: int) -> BatchRecord:
    """Somebody wants no more of it; the same record if that is known. Raises BatchState for one that ends already."""
    if record.status == "cancelling" or record.status == "cancelled":
        return record
    if record.ended or record.status == "finalizing":
        raise BatchState(f"the batch is {record.status}: it cannot be cancelled any more")
    return replace(record, status="cancelling", cancelling_at=now, end="cancelled")


def expired(record: BatchRecord) -> BatchRecord:
    """Its window is over: what is not done will not be done."""
    assert not record.ended
    return record if record.end is not None else replace(record, end="expired")


def broken(record: BatchRecord, problem: Problem) -> BatchRecord:
    """It cannot go on. What is done is kept."""
    assert not record.ended
    if record.end is not None:
        return record
    return replace(record, end="failed", errors=(*record.errors, problem))


def intending(record: BatchRecord, intent: int) -> BatchRecord:
    """Lines before `intent` may be submitted from now on."""
    assert record.end is None, record.end
    assert record.intent <= intent <= record.total
    return replace(record, intent=intent)


def counted(record: BatchRecord, completed: int, failed: int) -> BatchRecord:
    """So many lines are done, beside those that are written."""
    assert record.cursor + completed + failed <= record.total
    return replace(record, ahead_completed=completed, ahead_failed=failed)


def written(record: BatchRecord, lines: int, offset: int, failed: int, segment: Segment) -> BatchRecord:
    """The results of the next `lines` lines are in a segment; the input goes on at `offset`."""
    assert 0 <= failed <= lines
    assert record.cursor < record.cursor + lines <= record.total
    completed = lines - failed
    left = record.total - record.cursor - lines
    ahead_completed = min(max(0, record.ahead_completed - completed), left)
    ahead_failed = min(max(0, record.ahead_failed - failed), left - ahead_completed)
    return replace(
        record,
        cursor=record.cursor + lines,
        intent=max(record.intent, record.cursor + lines),
        offset=offset,
        completed=record.completed + completed,
        failed=record.failed + failed,
        ahead_completed=ahead_completed,
        ahead_failed=ahead_failed,
        segments=(*record.segments, segment),
    )


def finalizing(record: BatchRecord, output_file_id: str, error_file_id: str, now: int) -> BatchRecord:
    """Every line is written that will be: two files are made of the segments. No id: there is nothing for that one."""
    assert not record.ended, record.status
    assert record.cursor == record.total or record.end == "failed"
    end: End = record.end or "completed"
    problems = record.errors
    if end == "completed" and record.failed == record.total:
        end = "failed"
        message = f"none of the {record.total} requests succeeded: the error file says why of each"
        problems = (*problems, Problem(ALL_FAILED, message))
    return replace(
        record,
        status=record.status if record.status == "cancelling" else "finalizing",
        finalizing_at=now,
        end=end,
        errors=problems,
        ahead_completed=0,
        ahead_failed=0,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
    )


def finished(record: BatchRecord, now: int) -> BatchRecord:
    """The files are there."""
    assert not record.ended, record.status
    assert record.end is not None
    assert record.finalizing_at
    times = {f"{record.end}_at": now}
    return replace(record, status=record.end, **times)


def tidied(record: BatchRecord) -> BatchRecord:
    """Its segments are gone."""
    assert record.ended, record.status
    return replace(record, segments=())


def stopped_before(record: BatchRecord, now: int) -> BatchRecord:
    """It was cancelled, or expired, before its input was looked at: there are no lines, and no files."""
    assert record.end in ("cancelled", "expired"), record.end
    assert record.total == 0
    return replace(record, status=record.end, **{f"{record.end}_at": now})
