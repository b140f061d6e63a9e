"""`ChunkLimit`: how many prompt tokens a step may have that also decodes.

Every stream waits for the whole step, so a long prompt beside it is cut into chunks that take a
bounded time. A fixed number of tokens, or as many as the measured time of steps allows.

In a burst many wait for their first token and few have streams. Larger chunks bring all of them to
speed soonest, so a step may have more tokens then, decodes included: each stream waits for them.
"""

from penstock.types.step import StepPlan

_TARGET_S = 0.6  # a step's prompt tokens: what a stream may stop for
# Chunks are no smaller: what a step costs whatever its size counts for its tokens, so small chunks
# may look slow and make the next ones smaller still. SmolLM2-135M, 1,900 tokens, 2 cores of a busy
# host (2026-11-17): another stream stopped for 0.8 to 1.0 s with chunks of 256 and for 4.2 to 4.7 s
# with one; the first token came after 5.1 to 5.6 and 4.2 to 4.7 s, and after 11 to 19 s where
# chunks had become as small as 80 to 150.
_LEAST = 256
_NEW_WEIGHT = 0.5  # of the newest step in the running mean


# A burst: so many sequences without a token, and more than this share of those that decode.
_BURST, _BURST_SHARE = 8, 1 / 16


class ChunkLimit:
    """`fixed` None: measured. `in_bursts`: tokens of a whole step; None: the limit stays."""

    def __init__(
        self, fixed: int | None, max_num_tokens: int, in_bursts: int | None = None
    ) -> None:
        self._is_measured = fixed is None
        self._most = max_num_tokens
        self._in_bursts = in_bursts or 0
        self._token_s: float | None = None
        self.num_tokens = min(_LEAST if fixed is None else fixed, max_num_tokens)

    def of_step(self, num_new: int, num_decodes: int) -> int:
        """`num_new`: sequences that have no token yet and could have a row."""
        if num_new < _BURST or num_new <= _BURST_SHARE * num_decodes:
            return self.num_tokens
        return max(self.num_tokens, self._in_bursts - num_decodes)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long. Its decodes' part counts for the prompt's: that errs to one side."""
        if not self._is_measured or plan.num_decodes == plan.num_entries:
            return
        num_tokens = int(plan.num_tokens[plan.num_decodes :].sum())
        if num_tokens < min(_LEAST, self._most):
            return
        token_s = seconds / num_tokens
        if self._token_s is not None:
            token_s = _NEW_WEIGHT * token_s + (1 - _NEW_WEIGHT) * self._token_s
        self._token_s = token_s
        wanted = int(_TARGET_S / max(token_s, 1e-9))
        self.num_tokens = min(max(wanted, _LEAST), self._most)
