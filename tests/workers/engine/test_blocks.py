"""The block pool."""

import pytest

from workers.engine.blocks import BlockPool, blocks_for


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_blocks_follow_one_another_where_they_are_free() -> None:
    pool = BlockPool(8)
    assert pool.take(3, after=3) == [4, 5, 6]
    assert pool.take(2, after=6) == [7, 0]
    assert (pool.free, pool.used) == (3, 5)
    pool.check()


def test_what_was_given_back_is_taken_again_in_its_order() -> None:
    pool = BlockPool(4)
    taken = pool.take(4, after=-1)
    pool.give_back(taken[1:3])
    assert pool.free == 2
    assert pool.take(2, after=3) == [1, 2]
    pool.check()


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(2)
    taken = pool.take(1, after=-1)
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(taken)


def test_more_than_there_is_cannot_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3, after=-1)
    pool.check()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_check_notices_a_block_that_nobody_holds() -> None:
    pool = BlockPool(4)
    pool.take(1, after=-1)
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check()
