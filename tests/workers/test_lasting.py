"""What stays for good is out of collections of garbage."""

import gc

import pytest

from workers.main import lasting


def test_no_collection_walks_what_lasts() -> None:
    def work() -> list[list[int]]:
        assert not gc.isenabled()
        return [[] for _ in range(1000)]

    before = gc.get_freeze_count()
    try:
        made = lasting(work)
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_collections_go_on_when_it_fails() -> None:
    def work() -> None:
        raise ValueError("no weights")

    try:
        with pytest.raises(ValueError, match="no weights"):
            lasting(work)
        assert gc.isenabled()
    finally:
        gc.unfreeze()
