"""msgspec's refusals in the words of our errors."""

import re

_PLACE = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_TIME_OF_DAY = "matching regex '^([01][0-9]|2[0-3])"


def read(text: str) -> tuple[str, str]:
    """The place, e.g. `limits.warm`, empty for the whole, and the problem, of the text of a msgspec.ValidationError."""
    place = _PLACE.match(text)
    problem, path = (place["problem"], (place["path"] or "").lstrip(".")) if place else (text, "")
    if _TIME_OF_DAY in problem:
        problem = "a time of the day is expected, from 00:00 to 23:59"
    return path.removesuffix("[...]"), problem[:1].lower() + problem[
        1:
    ]  # [...]: some value; msgspec does not say which
