"""The header Prefer (RFC 7240), as far as it is heeded: `respond-async`, and with it `wait`."""

import re

import msgspec

HEADER = b"prefer"
APPLIED = b"preference-applied"
RESPOND_ASYNC = b"respond-async"

_is_seconds = re.compile(r"[0-9]{1,9}").fullmatch


class Preference(msgspec.Struct, frozen=True):
    """The answer may come later, as a job's, `wait_s` after the request at the earliest."""

    wait_s: int = 0


def preference(given: bytes | None) -> Preference | None:
    """None: the answer is to be waited for. What is not known, or makes no sense, is left alone, as the RFC has it."""
    if given is None:
        return None
    asked: dict[str, str] = {}
    for item in given.decode("latin-1").split(","):
        name, _, value = item.partition(";")[0].partition("=")
        asked.setdefault(name.strip().lower(), value.strip().strip('"'))
    if RESPOND_ASYNC.decode() not in asked:
        return None
    wait = asked.get("wait", "")
    return Preference(int(wait) if _is_seconds(wait) else 0)
