"""`truncation: auto`: the oldest turns are left out until a conversation fits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.errors import RequestError
from penstock.frontend.pipeline import GenerationPipeline
from penstock.types.request import GenerateInput

Message = Mapping[str, Any]
_OUTPUT_SHARE = 8  # of the context is left to an output whose length was not said


async def fitting(pipeline: GenerationPipeline, given: GenerateInput) -> GenerateInput:
    """With as few turns left out as possible, found by halving: each try renders the messages.
    Instructions at the beginning and the last turn stay; if these do not fit nothing is left out.
    """
    messages = given.messages or ()
    head, turns = _turns(messages)

    def without(num_turns: int) -> GenerateInput:
        kept = [message for turn in turns[num_turns:] for message in turn]
        return replace(given, messages=(*head, *kept))

    if len(turns) < 2 or await _fits(pipeline, given):
        return given
    low, high = 1, len(turns) - 1
    if not await _fits(pipeline, without(high)):
        return given
    while low < high:
        middle = (low + high) // 2
        if await _fits(pipeline, without(middle)):
            high = middle
        else:
            low = middle + 1
    return without(high)


def _turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Instructions at the beginning; then turns, each from a user's message to the next."""
    num_head = 0
    while num_head < len(messages) and messages[num_head]["role"] in ("system", "developer"):
        num_head += 1
    turns: list[list[Message]] = []
    for message in messages[num_head:]:
        if not turns or message["role"] == "user":
            turns.append([])
        turns[-1].append(message)
    return list(messages[:num_head]), turns


async def _fits(pipeline: GenerationPipeline, given: GenerateInput) -> bool:
    try:
        ids, _ = await pipeline.tokenize(given)
    except RequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    max_seq_len = pipeline.client.info.max_seq_len
    wanted = given.sampling.max_tokens or max_seq_len // _OUTPUT_SHARE
    return len(ids) + min(wanted, max_seq_len // 2) <= max_seq_len
