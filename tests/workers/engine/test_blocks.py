"""The block pool."""

import pytest

from workers.engine.blocks import BlockPool, blocks_for, chain


class Holder:
    """Whoever takes blocks."""

    def __init__(self) -> None:
        self.blocks = 0


HASHES = [bytes([index]) for index in range(32)]


def filled(pool: BlockPool, count: int, holder: Holder, first: int = 0) -> list[int]:
    """`count` blocks that are known by HASHES[first] and so on."""
    taken = pool.take(count, -1, holder)
    for block, content in zip(taken, HASHES[first:], strict=False):
        pool.register(block, content)
    return taken


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_blocks_follow_one_another_where_they_are_free() -> None:
    pool, holder = BlockPool(8), Holder()
    assert pool.take(3, 3, holder) == [4, 5, 6]
    assert pool.follows(6)
    assert pool.take(2, 6, holder) == [7, 0]
    assert not pool.follows(3)
    assert (pool.free, pool.used, holder.blocks) == (3, 5, 5)
    pool.check_each()


def test_what_was_given_back_is_taken_again_in_its_order() -> None:
    pool, holder = BlockPool(4), Holder()
    taken = pool.take(4, -1, holder)
    pool.give_back(taken[1:3])
    assert (pool.free, pool.returned, holder.blocks) == (2, 2, 2)
    assert pool.take(2, 3, holder) == [1, 2]
    pool.check_each()


def test_a_known_block_is_found_held_or_free_and_shared_by_reference() -> None:
    pool, first, second = BlockPool(4), Holder(), Holder()
    taken = filled(pool, 2, first)
    assert pool.find(HASHES[:3]) == taken
    assert pool.find(HASHES[2:]) == []
    assert pool.idle(taken) == 0
    pool.share(taken, second)
    pool.give_back(taken)
    assert (pool.used, first.blocks, second.blocks) == (2, 2, 0)  # on the account of whoever took them first
    assert not pool.writable(taken[0])
    pool.give_back(taken)
    assert (pool.used, pool.cached, pool.idle(taken), first.blocks) == (0, 2, 2, 0)
    pool.check_each()
    pool.share(pool.find(HASHES[:1]), second)
    assert (pool.used, pool.cached, second.blocks) == (1, 1, 1)
    pool.check_each()


def test_plain_blocks_are_reused_first_then_the_known_one_that_was_free_for_longest() -> None:
    pool, holder = BlockPool(6), Holder()
    old, new = filled(pool, 2, holder), filled(pool, 2, holder, first=2)
    pool.give_back(old)
    pool.give_back(new)
    assert sorted(pool.take(2, -1, holder)) == [4, 5]
    assert pool.cached == 4
    assert pool.take(1, -1, holder) == [old[1]]  # the end of a text goes before its beginning
    assert pool.find(HASHES[:2]) == old[:1]
    assert pool.take(2, -1, holder) == [old[0], new[1]]
    assert pool.find(HASHES[:1]) == []
    assert pool.find(HASHES[2:4]) == new[:1]
    pool.check_each()


def test_blocks_taken_from_the_cache_come_in_ascending_order() -> None:
    pool, holder = BlockPool(4), Holder()
    pool.give_back(filled(pool, 4, holder))
    assert pool.take(3, -1, holder) == [1, 2, 3]


def test_of_two_blocks_with_the_same_contents_the_first_is_known() -> None:
    pool, holder = BlockPool(4), Holder()
    first, second = filled(pool, 1, holder), filled(pool, 1, holder)
    assert pool.find(HASHES[:1]) == first
    assert pool.writable(second[0])
    pool.give_back(second)
    pool.give_back(first)
    assert pool.cached == 1
    pool.check_each()


def test_a_forgotten_block_is_not_found_and_is_plain_when_it_is_free() -> None:
    pool, holder = BlockPool(2), Holder()
    taken = filled(pool, 2, holder)
    pool.forget(taken[:1])
    assert pool.find(HASHES[:2]) == []
    pool.give_back(taken)
    assert pool.cached == 1
    pool.check_each()


def test_a_hash_covers_the_tokens_of_a_block_and_all_before_it() -> None:
    tokens = list(range(16))
    assert chain(b"a", tokens) == chain(b"a", tokens)
    different = {
        chain(b"a", tokens),
        chain(b"b", tokens),
        chain(b"a", tokens[::-1]),
        chain(chain(b"a", tokens), tokens),
    }
    assert len(different) == 4
    assert {len(each) for each in different} == {16}


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(2)
    taken = pool.take(1, -1, Holder())
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(taken)


def test_more_than_there_is_cannot_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3, -1, Holder())
    pool.check()


def test_a_block_that_is_not_known_cannot_be_shared() -> None:
    pool, holder = BlockPool(2), Holder()
    with pytest.raises(AssertionError, match="not known"):
        pool.share(pool.take(1, -1, holder), holder)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_check_notices_a_block_that_nobody_holds() -> None:
    pool = BlockPool(4)
    pool.take(1, -1, Holder())
    pool._references[0] = 0
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.check()


def test_check_notices_a_hash_without_its_block() -> None:
    pool = BlockPool(4)
    filled(pool, 2, Holder())
    pool._hashes[0] = None
    with pytest.raises(AssertionError, match="1 blocks have a hash, 2 hashes a block"):
        pool.check()
