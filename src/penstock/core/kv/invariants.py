"""`check`: what must hold of a KV manager between any two calls. Used by every KV test."""

from collections import Counter
from collections.abc import Iterable

from penstock.core.kv.groups import NO_BLOCK
from penstock.core.kv.manager import Holder, KVManager
from penstock.types.cache_spec import RESERVED_BLOCKS


def check(kv: KVManager, holders: Iterable[Holder]) -> None:
    """No block lost, none in two places, reference counts equal to the holders and pins that really
    hold; the same of blocks in host memory."""
    for g, num_host_blocks in enumerate(kv._host.num_blocks):
        tables = [swapped.tables[g] for swapped in kv._host._swapped.values()]
        taken = [block for table in tables for block in table.blocks[table.num_evicted :]]
        everywhere = sorted([*kv._host._free[g], *taken])
        assert everywhere == list(range(num_host_blocks)), "lost, or taken twice"
    holders = list(holders)
    for g, group in enumerate(kv.groups):
        pool = group.pool
        held = Counter(
            block for holder in holders for block in holder.tables[g].blocks if block != NO_BLOCK
        )
        held += pool._pins
        free = [*pool._blank, *pool._reusable, *pool._quarantine]
        assert len(set(free)) == len(free), "a block is free twice"
        assert not set(free) & set(held), "a block is free and held"
        expected = set(range(RESERVED_BLOCKS, pool.num_blocks))
        assert set(free) | set(held) == expected, f"lost: {expected - set(free) - set(held)}"
        for block in expected:
            assert pool.refs(block) == held[block], (block, pool.refs(block), held[block])
        for holder in holders:
            table = holder.tables[g]
            assert table.blocks.count(NO_BLOCK) == table.num_evicted
            blocks = table.blocks[table.num_evicted :]
            assert len(set(blocks)) == len(blocks), "a holder has a block twice"
