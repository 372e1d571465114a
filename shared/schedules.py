"""Scheduled minimums: which window of a version's schedule is open. Pure; times are unix seconds, windows are in UTC."""

from collections.abc import Iterable

from shared.records import DAYS, Window

MINUTE_S = 60
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
EPOCH_DAY = DAYS.index("thu")  # 1 January 1970


def min_replicas(schedule: Iterable[Window], at: float) -> int:
    """The most that the windows open at `at` ask for; 0 where none is."""
    return max((window.min_replicas for window in schedule if is_open(window, at)), default=0)


def is_open(window: Window, at: float) -> bool:
    """Whether a window, which begins on one of its days and ends within 24 hours, is open."""
    minute = (int(at // MINUTE_S) + EPOCH_DAY * DAY_MINUTES) % WEEK_MINUTES
    begins, length = minute_of(window.from_), (minute_of(window.to) - minute_of(window.from_)) % DAY_MINUTES
    return any(
        (minute - DAYS.index(day) * DAY_MINUTES - begins) % WEEK_MINUTES < (length or DAY_MINUTES)
        for day in window.days
    )


def minute_of(time_of_day: str) -> int:
    """Minutes since midnight of "HH:MM"."""
    hours, _, minutes = time_of_day.partition(":")
    return int(hours) * 60 + int(minutes)
