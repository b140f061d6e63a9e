"""`Thinking`: one request's reasoning and its budget; where that is used up, the end is forced."""

from collections.abc import Sequence
from copy import copy

from penstock.types.request import ThinkingBudget

_LAST_START = 8  # tokens of an output within which reasoning begins that does not reopen


class Thinking:
    """`forced`: tokens that must come next. `banned`: one that may not."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self.forced: tuple[int, ...] = ()
        self.banned: int | None = None
        self._budget = budget
        self._is_open = budget.is_open
        self._may_open = True
        self._last: tuple[int, ...] = ()  # tokens, as many as open it
        self._num_seen = self._num_spent = 0
        self._force()

    @property
    def has_mask(self) -> bool:
        return bool(self.forced) or self.banned is not None

    def allows(self, token_id: int) -> bool:
        return token_id != self.banned and token_id in (self.forced[:1] or (token_id,))

    def behind(self, token_id: int) -> "Thinking":
        """As it would be, had this token come."""
        ahead = copy(self)
        ahead.on_commit((token_id,))
        return ahead

    def on_commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._step(token_id)
            self._force()

    def _step(self, token_id: int) -> None:
        budget, self.banned = self._budget, None
        self._num_seen += 1
        if self.forced:
            self.forced = self.forced[1:]
            if not self.forced:
                self._close()
                self.banned = budget.not_next
        elif self._is_open:
            if token_id in budget.closing:
                self._close()
            else:
                self._num_spent += 1
        elif self._may_open and (budget.may_reopen or self._num_seen <= _LAST_START):
            self._last = (*self._last, token_id)[-len(budget.opening) :]
            self._is_open = self._last == budget.opening

    def _close(self) -> None:
        self._is_open, self._may_open, self._last = False, self._budget.may_reopen, ()

    def _force(self) -> None:
        if self._is_open and not self.forced and self._num_spent >= self._budget.num_tokens:
            self.forced = self._budget.ending
