"""`ChunkLimit`: how many prompt tokens a step may have that also decodes.

Every stream waits for the whole step, so a long prompt beside it is cut into chunks that take a
bounded time. A fixed number of tokens, or as many as the measured time of steps allows.
"""

from penstock.types.step import StepPlan

_TARGET_S = 0.6  # a step's prompt tokens: what a stream may stop for
# What a step costs whatever its size counts for its tokens. So small chunks look slow, and would
# make the next ones smaller still: there are none. Of 1,900 tokens on 2 cores of a busy host,
# SmolLM2-135M: the first token came after 11 to 19 s in chunks of 80 to 150, after 5 in chunks of
# 256 and in one; another stream stopped for 0.8 to 1.0 s with 256, for 4.2 to 4.7 with one
# (2026-11-17).
_LEAST = 256
_NEW_WEIGHT = 0.5  # of the newest step in the running mean


class ChunkLimit:
    """`fixed` None: measured."""

    def __init__(self, fixed: int | None, max_num_tokens: int) -> None:
        self._is_measured = fixed is None
        self._most = max_num_tokens
        self._token_s: float | None = None
        self.num_tokens = min(_LEAST if fixed is None else fixed, max_num_tokens)

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
