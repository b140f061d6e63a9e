"""`Placement`: on which data-parallel rank a sequence starts, and whether prompts wait for others.

All ranks run a step together, which takes as long as the busiest of them. Knows loads and prefixes;
whether there is room is decided by `policy`.
"""

from collections.abc import Sequence as Seq

from penstock.config.run import PromptBalance
from penstock.core.kv.manager import KVManager
from penstock.core.sequence import Sequence

# Sequences by which the rank with a prefix may be ahead of the least busy one: at least, and as a
# share of its load.
_MIN_SLACK = 4
_SLACK = 0.25


class Placement:
    """`balance` None: prompts never wait."""

    def __init__(self, kvs: Seq[KVManager], balance: PromptBalance | None = None) -> None:
        self._kvs = kvs
        self._balance = balance
        self._num_batching = 0  # plans since every rank could begin a prompt
        self._num_waited = 0  # plans since some rank could not

    def order(self, seq: Sequence, loads: dict[int, int]) -> list[int]:
        """The ranks of `loads`, which is rank -> sequences that run there, the best one first:
        where most of the sequence is cached, unless that rank is busy. Where it was swapped out it
        comes back, and nowhere else."""
        if len(loads) == 1:
            return list(loads)
        if seq.dp_rank in loads and self._kvs[seq.dp_rank].is_swapped_out(seq.id):
            return [seq.dp_rank]
        least = min(loads.values())
        most = least + max(_MIN_SLACK, int(_SLACK * least))

        def key(rank: int) -> tuple[bool, int, int, int]:
            num_cached = self._num_cached_blocks(rank, seq)
            return loads[rank] > most, -num_cached, loads[rank], rank

        return sorted(loads, key=key)

    def _num_cached_blocks(self, rank: int, seq: Sequence) -> int:
        """Whole ones: by chance any two prompts have some first tokens in common."""
        kv = self._kvs[rank]
        match = kv.match(seq.extra_keys, seq.tokens, seq.num_tokens - 1)
        return match.num_tokens // kv.groups[0].block_size

    def may_begin(self, num_waiting: int, num_free_rows: Seq[int], running: Seq[Sequence]) -> bool:
        """Whether prompts may begin in the plan that is made now; asked once for each plan.

        Held back are those that would run on some ranks alone, as long as every rank has decodes to
        go on with.
        """
        if self._balance is None or not num_waiting:
            return True
        ranks = range(len(self._kvs))
        prefilling = {seq.dp_rank for seq in running if seq.is_prefilling}
        decoding = {seq.dp_rank for seq in running if not seq.is_prefilling}
        has_rest = len(decoding) < len(ranks)  # a rank that would wait for nothing
        idle = [rank for rank in ranks if rank not in prefilling]
        if all(num_free_rows) and num_waiting >= len(idle):
            self._num_waited = 0
            if not has_rest and self._num_batching < self._balance.batching_wait:
                self._num_batching += 1
                return False
            self._num_batching = 0
            return True
        if not has_rest and self._num_waited < self._balance.timeout:
            self._num_waited += 1
            return False
        self._num_waited = 0
        return True
