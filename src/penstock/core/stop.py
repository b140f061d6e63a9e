"""When a sequence has said enough, judged on ids alone: a stop id, or its length."""

from penstock.core.sequence import Sequence
from penstock.types.request import FinishReason


def finish_reason(seq: Sequence, token_id: int) -> FinishReason | None:
    """Why `seq` ends with `token_id`, its newest token, or None to go on."""
    is_stop = token_id in seq.request.stop_ids
    if is_stop and seq.num_output >= seq.request.sampling.min_tokens:
        return FinishReason.STOP
    if seq.num_output >= seq.request.max_tokens:
        return FinishReason.LENGTH
    return None
