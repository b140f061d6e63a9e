"""`TokenDelta`: what a step found for one sequence, as its API server receives it.

Does not decide when a delta is due or how a request ends (`scheduler`).
"""

from penstock.core.plan_builder import Entry
from penstock.core.sequence import Sequence
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import FinishReason
from penstock.types.step import Float32s, LogprobRows


def report(
    seq: Sequence,
    prompt_logprobs: tuple[TokenLogprob, ...],
    reason: FinishReason | None,
    pooled: Float32s | None = None,
) -> TokenDelta:
    """All output that has not been reported yet."""
    new_ids = tuple(seq.tokens[seq.num_prompt + seq.num_reported :].tolist())
    is_first = seq.num_reported == 0
    delta = TokenDelta(
        request_id=seq.id,
        token_ids=new_ids,
        logprobs=tuple(seq.unreported_logprobs),
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=min(seq.num_cached, seq.num_prompt) if is_first else 0,
        finish=reason,
        stop_id=new_ids[-1] if reason is FinishReason.STOP else None,
        num_steps=seq.num_steps,
        pooled=b"" if pooled is None else pooled.tobytes(),
    )
    seq.num_reported = seq.num_output
    seq.unreported_logprobs.clear()
    return delta


def new_prompt_logprobs(entry: Entry, rows: LogprobRows) -> tuple[TokenLogprob, ...]:
    """Without positions that were reported before; a preempted sequence computes them again."""
    seq, found = entry.seq, logprob_tuple(rows)
    new = found[max(0, seq.num_prompt_logprobs - entry.start) :]
    seq.num_prompt_logprobs += len(new)
    return new


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
