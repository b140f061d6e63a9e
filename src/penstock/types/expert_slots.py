"""Experts in slots: which expert each slot of a layer holds. Numbers, no tensors.

Slots are numbered over all ranks of a stage, each rank has as many, in order. An expert has one
slot or several, each on another rank; then its tokens are shared among them.
"""

# E experts, S slots, R ranks, N slots of a rank

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlots:
    """What a layer of experts starts with, and how it goes on."""

    num_slots: int
    layer_updates: int = 0  # layers whose experts may move before each step
    initial: tuple[tuple[int, tuple[int, ...]], ...] = ()  # layers, and what their slots hold


def first_slots(num_experts: int, num_slots: int, num_ranks: int) -> tuple[int, ...]:
    """Where nothing is known of the load: every rank begins with its share, and goes on with that
    of the next ranks."""
    per_rank = num_slots // num_ranks
    return tuple(
        (rank * num_experts // num_ranks + at) % num_experts
        for rank in range(num_ranks)
        for at in range(per_rank)
    )


def check_num_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    what = f"moe_config.load_balancer.num_slots is {num_slots}"
    if num_slots % num_ranks:
        near = -(-max(num_slots, num_experts) // num_ranks) * num_ranks
        raise ConfigError(
            f"{what}, which {num_ranks} expert-parallel ranks cannot share equally; use {near}"
        )
    if num_slots < num_experts:
        raise ConfigError(f"{what}, but there are {num_experts} experts; use as many at least")
    if num_slots > num_experts * num_ranks:
        raise ConfigError(
            f"{what}, but {num_experts} experts on each of {num_ranks} ranks are "
            f"{num_experts * num_ranks}; use at most that"
        )


def check_slots(what: str, experts_S: Sequence[int], num_experts: int, num_ranks: int) -> None:
    """Refuse experts that are nowhere, or twice on a rank."""
    if unknown := sorted(set(experts_S) - set(range(num_experts))):
        raise ConfigError(
            f"{what} names expert {unknown[0]}; there are {num_experts}, numbered from 0"
        )
    if missing := sorted(set(range(num_experts)) - set(experts_S)):
        raise ConfigError(f"{what} has no slot for expert {missing[0]}; every expert needs one")
    per_rank = len(experts_S) // num_ranks
    for rank in range(num_ranks):
        own = experts_S[rank * per_rank : (rank + 1) * per_rank]
        expert, count = Counter(own).most_common(1)[0]
        if count > 1:
            raise ConfigError(
                f"{what} has expert {expert} {count} times on rank {rank} (slots "
                f"{rank * per_rank} to {(rank + 1) * per_rank - 1}); once is enough"
            )


def rank_loads(loads_E: Sequence[float], experts_S: Sequence[int], num_ranks: int) -> list[float]:
    """Where an expert's tokens are shared equally among its slots."""
    copies, per_rank = Counter(experts_S), len(experts_S) // num_ranks
    shares = [loads_E[expert] / copies[expert] for expert in experts_S]
    return [sum(shares[at : at + per_rank]) for at in range(0, len(shares), per_rank)]


def imbalance(loads_E: Sequence[float], experts_S: Sequence[int], num_ranks: int) -> float:
    """Load of the busiest rank over the mean; 1 where there is none."""
    loads_R = rank_loads(loads_E, experts_S, num_ranks)
    total = sum(loads_R)
    return max(loads_R) * num_ranks / total if total else 1.0


def balanced_slots(
    loads_E: Sequence[float], num_slots: int, num_ranks: int, current: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Slots such that ranks have about the same load. Of what a rank holds in `current`, whatever
    it keeps stays in its slot. The same on every rank that is given the same."""
    copies_E = _copies(loads_E, num_slots, num_ranks)
    ranks = _placed(loads_E, copies_E, num_slots // num_ranks, num_ranks)
    _exchange(loads_E, copies_E, ranks)
    if current is None:
        return tuple(expert for own in ranks for expert in sorted(own))
    return _in_place(ranks, current)


def _copies(loads_E: Sequence[float], num_slots: int, num_ranks: int) -> list[int]:
    """Slots of each expert: one more, again and again, for the one whose slots have most to do."""
    copies_E = [1] * len(loads_E)
    heap = [(-float(load), expert) for expert, load in enumerate(loads_E)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(loads_E)):
        _, expert = heapq.heappop(heap)
        copies_E[expert] += 1
        if copies_E[expert] < num_ranks:
            heapq.heappush(heap, (-loads_E[expert] / copies_E[expert], expert))
    return copies_E


def _placed(
    loads_E: Sequence[float], copies_E: Sequence[int], per_rank: int, num_ranks: int
) -> list[set[int]]:
    """Each expert on as many ranks as it has slots, those that have least to do. Where that leaves
    too few ranks with room for the rest: on those that have most room, which never does."""
    for by_room in (False, True):
        ranks: list[set[int]] = [set() for _ in range(num_ranks)]
        loads_R = [0.0] * num_ranks

        def key(rank: int, by_room: bool = by_room) -> tuple[float, float, int]:
            return len(ranks[rank]) if by_room else 0, loads_R[rank], rank  # noqa: B023

        def order(expert: int) -> tuple[bool, float, int]:
            copies = copies_E[expert]
            return copies == 1, -copies if by_room else -loads_E[expert] / copies, expert  # noqa: B023

        for expert in sorted(range(len(loads_E)), key=order):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank]
            chosen = heapq.nsmallest(copies_E[expert], free, key=key)
            if len(chosen) < copies_E[expert]:
                break
            for rank in chosen:
                ranks[rank].add(expert)
                loads_R[rank] += loads_E[expert] / copies_E[expert]
        else:
            return ranks
    raise AssertionError((copies_E, per_rank))


def _exchange(loads_E: Sequence[float], copies_E: Sequence[int], ranks: list[set[int]]) -> None:
    """Swap experts of the busiest rank as long as that takes something from it."""
    share = [load / copies for load, copies in zip(loads_E, copies_E, strict=True)]
    loads_R = [sum(share[expert] for expert in own) for own in ranks]
    for _ in range(2 * len(ranks)):
        most = max(range(len(ranks)), key=lambda rank: (loads_R[rank], -rank))
        best: tuple[float, int, int, int] | None = None
        for other in sorted(range(len(ranks)), key=lambda rank: (loads_R[rank], rank))[:4]:
            gap = loads_R[most] - loads_R[other]
            for given in sorted(ranks[most] - ranks[other]):
                for taken in sorted(ranks[other] - ranks[most]):
                    moved = share[given] - share[taken]
                    if 0 < moved < gap and (best is None or abs(gap / 2 - moved) < best[0]):
                        best = abs(gap / 2 - moved), other, given, taken
        if best is None:
            return
        _, other, given, taken = best
        ranks[most] ^= {given, taken}
        ranks[other] ^= {given, taken}
        moved = share[given] - share[taken]
        loads_R[most] -= moved
        loads_R[other] += moved


def _in_place(ranks: Sequence[set[int]], current: Sequence[int]) -> tuple[int, ...]:
    """Each set goes to the rank that has most of it already."""
    per_rank = len(current) // len(ranks)
    held = [current[rank * per_rank :][:per_rank] for rank in range(len(ranks))]
    pairs = sorted(
        (-len(own.intersection(held[rank])), number, rank)
        for number, own in enumerate(ranks)
        for rank in range(len(ranks))
    )
    of_rank: dict[int, set[int]] = {}
    taken = set()
    for _, number, rank in pairs:
        if number not in taken and rank not in of_rank:
            taken.add(number)
            of_rank[rank] = ranks[number]
    found: list[int] = []
    for rank, before in enumerate(held):
        new = iter(sorted(of_rank[rank] - set(before)))
        found += [expert if expert in of_rank[rank] else next(new) for expert in before]
    return tuple(found)
