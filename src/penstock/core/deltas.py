"""Turns the device's arrays of log-probabilities into the records a front end receives."""

from penstock.types.outputs import TokenLogprob
from penstock.types.step import LogprobRows


def logprob_tuple(rows: LogprobRows) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            rows.token_ids.tolist(),
            rows.logprobs.tolist(),
            rows.ranks.tolist(),
            rows.top_ids.tolist(),
            rows.top_logprobs.tolist(),
            strict=True,
        )
    )
