"""How much may be open: in all, for one HTTP request, for one tenant, and for health checks.

Counts requests and the tokens of their prompts, over all API servers. Knows neither keys nor the
engine; the queue in the engine is fair on its own (`core/queue`), this one bounds it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CapacityError, RequestError
from penstock.ipc.messages import EngineInfo
from penstock.ipc.shared import Row
from penstock.types.tenant import ANONYMOUS, PROBE, Tenant

_MODEST = 64  # sequences of one request that any share allows
_COUNTED = ("requests", "tokens")
_PROBE_PLACES = 16  # of health checks, beyond the bound of all others


class Holdings:
    """Requests and prompt tokens that each tenant holds open: a row per API server, `own` is ours.

    The last column is that of health checks, so that `PROBE` is its index.
    """

    def __init__(self, num_tenants: int = 1, rows: Sequence[Row] | None = None, own: int = 0):
        if rows is None:
            tables = [np.zeros((num_tenants + 1, 2))]
        else:
            tables = [np.frombuffer(row).reshape(num_tenants + 1, 2) for row in rows]  # type: ignore[call-overload]
        self._tables: list[NDArray[np.float64]] = tables
        self._own = tables[own]

    @staticmethod
    def num_cells(num_tenants: int) -> int:
        return 2 * (num_tenants + 1)

    def change(self, tenant: int, num_requests: int, num_tokens: int) -> None:
        """Ours; the others do the same with theirs."""
        self._own[tenant] += (num_requests, num_tokens)

    def forget(self, index: int) -> None:
        """That API server has ended, and its requests with it."""
        self._tables[index][:] = 0

    def num_open_elsewhere(self) -> int:
        """Requests that the other API servers hold."""
        return int(sum(table[:, 0].sum() for table in self._tables if table is not self._own))

    def total(self) -> NDArray[np.float64]:
        """[tenant, (requests, tokens)], of all API servers; to be read only."""
        return sum(self._tables[1:], start=self._tables[0])


class Capacity:
    """`max_request_share`: of all places and tokens, for prompts and samples of one HTTP request.
    `reserved_share`: of both, kept for tenants that hold less than their part of it by weight.
    `bounds_tokens`: False for whoever waits for room instead of being refused (`LLM`)."""

    def __init__(
        self,
        tenants: Sequence[Tenant] = (ANONYMOUS,),
        holdings: Holdings | None = None,
        max_request_share: float = 1.0,
        reserved_share: float = 0.0,
        bounds_tokens: bool = False,
    ) -> None:
        self.holdings = Holdings(len(tenants)) if holdings is None else holdings
        self._tenants = tenants
        self._request_share = max_request_share
        self._bounds_tokens = bounds_tokens
        self._reserved: NDArray[np.float64] | None = None  # share of each tenant
        if reserved_share and len(tenants) > 1:
            weights = np.array([tenant.weight for tenant in tenants])
            self._reserved = (reserved_share * weights / weights.sum())[:, None]

    def check_request(
        self, info: EngineInfo, num_samples: int, num_sequences: int, num_tokens: int = 0
    ) -> None:
        """What one HTTP request asks for, all of it: more can never be accepted."""
        most = min(info.max_queued, _MODEST)
        most = max(most, int(self._request_share * info.max_queued))
        if num_sequences > most:
            raise RequestError(
                "invalid_value",
                f"prompts times samples make {num_sequences} sequences, at most {most} of "
                f"max_queued_requests {info.max_queued} may come at a time; send fewer, or raise "
                "max_queued_requests or access_config.max_request_share",
                "n" if num_sequences == num_samples else "prompt",
            )
        if not self._bounds_tokens:
            return
        most = max(int(self._request_share * info.max_queued_tokens), info.max_seq_len)
        most = min(most, info.max_queued_tokens)
        if num_tokens > most:
            raise RequestError(
                "invalid_value",
                f"the request has {num_tokens} prompt tokens, counted for each sample; at most "
                f"{most} may come at a time; send less, or raise max_queued_tokens or "
                "access_config.max_request_share",
                "prompt",
            )

    def check_room(
        self, info: EngineInfo, num_engines: int, index: int, num_requests: int, num_tokens: int
    ) -> None:
        """Whether a tenant may have so many more open now."""
        held = self.holdings.total()
        if index == PROBE:
            if held[PROBE, 0] + num_requests > _PROBE_PLACES:
                raise CapacityError(f"{_PROBE_PLACES} health checks are open, no more fit now")
            return
        asked, most = [num_requests], [info.max_queued * num_engines]
        if self._bounds_tokens:
            asked.append(num_tokens)
            most.append(info.max_queued_tokens * num_engines)
        held = held[:PROBE, : len(asked)]
        self._check_own(self._tenants[index], held[index], asked)
        used = held.sum(axis=0).tolist()
        kept_for_others = self._kept_for_others(index, held, most)
        for i, what in enumerate(_COUNTED[: len(asked)]):
            if used[i] + asked[i] > most[i]:
                raise CapacityError(
                    f"{used[i]:.0f} {_in_words(what)} are open and at most {most[i]} may be; try "
                    f"again later or raise max_queued_{what}"
                )
            if used[i] + asked[i] + kept_for_others[i] > most[i]:
                raise CapacityError(
                    f"this key has {held[index, i]:.0f} {_in_words(what)} open, more than its "
                    f"share, and the last {kept_for_others[i]:.0f} of {most[i]} are kept for other "
                    f"keys; try again later or raise max_queued_{what}"
                )

    def _kept_for_others(
        self, index: int, held: NDArray[np.float64], most: Sequence[int]
    ) -> list[float]:
        if self._reserved is None:
            return [0.0] * len(most)
        kept = np.maximum(0, np.floor(self._reserved * most) - held)
        kept[index] = 0
        total: list[float] = kept.sum(axis=0).tolist()
        return total

    def _check_own(self, tenant: Tenant, held: NDArray[np.float64], asked: Sequence[int]) -> None:
        limits = (tenant.max_queued_requests, tenant.max_queued_tokens)
        for what, most, have, more in zip(_COUNTED, limits, held, asked, strict=False):
            if most is not None and more > most:
                raise RequestError(
                    "invalid_value",
                    f"{more} {_in_words(what)} asked, this key may have {most} open; send fewer at "
                    f"a time, or raise max_queued_{what} of the key",
                    "prompt",
                )
            if most is not None and have + more > most:
                raise CapacityError(
                    f"this key has {have:.0f} {_in_words(what)} open and at most {most} may be; "
                    f"try again later, or raise max_queued_{what} of the key"
                )


def _in_words(what: str) -> str:
    return "prompt tokens" if what == "tokens" else what
