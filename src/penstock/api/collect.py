"""Text deltas of one generation -> the `RequestOutput` a Python user gets."""

import math
from itertools import chain

from penstock.errors import BackendError, PenstockError
from penstock.frontend.generation import Generation
from penstock.text.tools.calls import joined
from penstock.types.outputs import CompletionOutput, RequestOutput, TextDelta, Usage
from penstock.types.request import FinishReason


class Collector:
    """Keeps what has arrived; `output` once every sample has finished."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._samples: list[list[TextDelta]] = [[] for _ in range(generation.num_samples)]

    def add(self, delta: TextDelta) -> None:
        if delta.finish is FinishReason.ERROR:
            raise BackendError(delta.error or "the engine failed while it worked on this request")
        self._samples[delta.index].append(delta)

    def output(self) -> RequestOutput:
        outputs = tuple(map(_completion, self._samples))
        first = self._samples[0]
        prompt_logprobs = tuple(chain.from_iterable(delta.prompt_logprobs for delta in first))
        return RequestOutput(
            prompt=self._generation.prompt_text,
            prompt_token_ids=tuple(map(int, self._generation.prompt_ids)),
            outputs=outputs,
            # Nothing comes before the first prompt token, so it has no probability.
            prompt_logprobs=(None, *prompt_logprobs) if prompt_logprobs else None,
            usage=Usage(
                prompt_tokens=len(self._generation.prompt_ids),
                completion_tokens=sum(d.num_tokens for d in chain.from_iterable(self._samples)),
                cached_tokens=max(delta.num_cached_tokens for delta in first),
            ),
        )


def _completion(deltas: list[TextDelta]) -> CompletionOutput:
    last = deltas[-1] if deltas else None
    if last is None or last.finish is None:
        raise PenstockError("the request was cancelled before it had finished")
    logprobs = tuple(chain.from_iterable(delta.logprobs for delta in deltas))
    return CompletionOutput(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=joined(chain.from_iterable(delta.tool_calls for delta in deltas)),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish_reason=last.finish,
        stop_reason=last.stop_reason,
        pooled=last.pooled,
        beam_score=last.beam_score,
        avg_decoded_tokens_per_iter=last.tokens_per_step,
        logprobs=logprobs,
        cumulative_logprob=math.fsum(one.logprob for one in logprobs) if logprobs else None,
    )
