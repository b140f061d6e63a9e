"""`BeamGeneration`: a beam search above the engine, a round of requests for each token.

Every beam is a request of one token with its likeliest alternatives; its prompt is the user's and
what the beam has written, whose cache the engine finds again (prefix reuse).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from penstock.errors import CapacityError, PenstockError, RequestError
from penstock.frontend.beams import BeamSearch
from penstock.frontend.client import EngineClient
from penstock.frontend.generation import Generation
from penstock.frontend.sample import Sample
from penstock.types.outputs import TextDelta, TokenDelta, TokenLogprob
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import MAX_LOGPROBS, SamplingParams

_RETRY_S = 0.05  # when the queue is full in the middle of a search


def beam_sampling(sampling: SamplingParams, num_stop_ids: int) -> SamplingParams:
    """What the engine is asked for each beam and token."""
    num_candidates = sampling.num_samples + num_stop_ids
    if num_candidates > MAX_LOGPROBS:
        raise RequestError(
            "invalid_value",
            f"{sampling.num_samples} beams and {num_stop_ids} stop ids make {num_candidates} "
            f"candidates for each beam, at most {MAX_LOGPROBS} are looked at; ask for fewer",
            "n" if sampling.best_of is None else "best_of",
        )
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=max(num_candidates, sampling.logprobs or 0),
    )


class BeamGeneration(Generation):
    """The best `n` outputs come at the end, as samples do that are ranked."""

    def __init__(
        self,
        client: EngineClient,
        request: Request,
        samples: Sequence[Sample],
        sampling: SamplingParams,
        prompt_text: str | None,
        on_first_token: Callable[[], None],
    ) -> None:
        """`request`: as a sample of its own would be; `samples`: one for each output."""
        self._client = client
        self._request = request
        self._step_sampling = beam_sampling(sampling, len(request.stop_ids))
        self._search = BeamSearch(
            sampling.num_samples,
            request.stop_ids,
            request.max_tokens,
            sampling.length_penalty,
            sampling.early_stopping,
        )
        self._tops: dict[int, TokenLogprob] = {}  # by request id, of the round under way
        self._num_generated = 0
        self._num_cached = 0
        self._loop = asyncio.get_running_loop()
        super().__init__(client, self._round(), samples[:1], sampling, prompt_text, on_first_token)
        self.prompt_ids = request.prompt_ids
        self._samples = samples
        self._must_rank = False

    @property
    def num_tokens(self) -> int:
        return self._num_generated

    def hold(self) -> None:
        """Nothing comes before the end."""

    def release(self) -> None:
        pass

    def abort(self) -> None:
        ids = list(self._open)
        if ids:
            self._finish_all(FinishReason.ABORT)
            self._client.abort(ids)

    def on_tokens(self, delta: TokenDelta) -> None:
        if delta.request_id not in self._open:
            return
        if delta.finish is FinishReason.ERROR:
            ids = list(self._open)
            self._finish_all(FinishReason.ERROR, delta.error)
            self._client.abort(ids)
            return
        if not delta.logprobs:
            return  # cancelled: whoever did it has said so
        if not self._num_generated:
            self._num_cached = delta.num_cached_tokens
            self._on_first_token()
        self._num_generated += 1
        self._tops[delta.request_id] = delta.logprobs[0]
        if len(self._tops) == len(self._open):
            try:
                self._advance()
            except Exception as bug:  # this request's alone: the others share the caller
                self._bug = bug
                self._drop()
            self._pass_on()

    def _advance(self) -> None:
        tops = [self._tops[one] for one in self._open]
        self._tops.clear()
        self._search.step(tops)
        if self._search.is_done:
            self._open.clear()
            self._ready.extend(self._outputs())
            return
        requests = self._round()
        self._open = {one.id: self._samples[0] for one in requests}
        self._submit(requests)

    def _round(self) -> list[Request]:
        """One for each running beam, in their order."""
        prompt_ids = self._request.prompt_ids
        return [
            replace(
                self._request,
                id=self._client.new_id(),
                prompt_ids=np.concatenate([prompt_ids, np.array(beam.token_ids, np.int32)]),
                sampling=self._step_sampling,
                max_tokens=1,
                stop_ids=(),
            )
            for beam in self._search.running
        ]

    def _submit(self, requests: Sequence[Request]) -> None:
        if requests[0].id not in self._open:
            return  # closed while it waited
        try:
            self._client.submit(requests, self.on_tokens)
        except CapacityError:  # it is under way already: it waits for its turn
            self._loop.call_later(_RETRY_S, self._submit, requests)
        except PenstockError as error:
            self._finish_all(FinishReason.ERROR, str(error))

    def _finish_all(self, finish: FinishReason, error: str | None = None) -> None:
        self._open.clear()
        self._ready.extend(
            TextDelta(index=index, finish=finish, error=error) for index in range(self.num_samples)
        )
        self._pass_on()

    def _outputs(self) -> list[TextDelta]:
        asked, outputs = self._sampling, []
        for sample, found in zip(self._samples, self._search.finished, strict=False):
            entries = () if asked.logprobs is None else found.beam.entries
            delta = TokenDelta(
                request_id=self._request.id,
                token_ids=found.beam.token_ids,
                logprobs=tuple(_trimmed(one, asked.logprobs or 0) for one in entries),
                num_cached_tokens=self._num_cached,
                finish=FinishReason.LENGTH if found.stop_id is None else FinishReason.STOP,
                stop_id=found.stop_id,
                num_steps=len(found.beam.token_ids),
            )
            text = sample.push(delta)
            assert text is not None
            outputs.append(structs.replace(text, beam_score=found.score))
        return outputs


def _trimmed(entry: TokenLogprob, num: int) -> TokenLogprob:
    return replace(entry, top=entry.top[:num])
