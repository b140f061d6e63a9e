"""Checks one prompt against what the running engine can do: `Request`s, or a `RequestError`.

Knows ids and numbers. Does not know text (see `pipeline`) and does not talk to the engine.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import RequestError
from penstock.ipc.messages import EngineInfo
from penstock.types.pooling import Task
from penstock.types.request import GenerateInput, Grammar, Request, ThinkingBudget
from penstock.types.sampling import SamplingParams

MAX_STOP_STRING_CHARS = 1024


def make_requests(
    ask: GenerateInput,
    prompt_ids: Sequence[int],
    info: EngineInfo,
    eos_ids: Sequence[int],
    new_id: Callable[[], int],
    stream_interval: int = 1,
    grammar: str | None = None,
    thinking: ThinkingBudget | None = None,
) -> list[Request]:
    """One request per sample; samples after the first wait for its prefix (`leader`)."""
    sampling = ask.sampling
    _check_task(ask, info)
    _check_sampling(sampling, info)
    if ask.adapter is not None and not info.has_adapters:
        raise RequestError(
            "unsupported",
            f"adapter '{ask.adapter.name}' is asked for, but this engine takes none; start it with "
            "enable_lora or a lora_config",
            "lora_request",
        )
    if grammar is not None and sampling.ignore_eos:
        raise RequestError(
            "invalid_value",
            "ignore_eos is true, but an output that must match a grammar or call a tool ends with "
            "EOS; leave one of them out",
            "ignore_eos",
        )
    is_led = grammar is not None or thinking is not None
    if is_led and (sampling.allowed_token_ids or sampling.bad_words_token_ids):
        name = "allowed_token_ids" if sampling.allowed_token_ids else "bad_words"
        raise RequestError(
            "invalid_value",
            f"{name} may forbid all that a grammar, a tool call or a thinking budget allows; leave "
            "one of them out",
            name,
        )
    num_kept = ask.truncate_prompt_tokens
    if num_kept == -1:
        num_kept = max(1, info.max_seq_len - (sampling.max_tokens or 1))
    kept_ids = _truncated(prompt_ids, num_kept)
    _check_prompt(kept_ids, info)
    room = info.max_seq_len - len(kept_ids)
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    eos_of_all = () if sampling.ignore_eos else (*info.eos_token_ids, *eos_ids)
    first = Request(
        id=new_id(),
        prompt_ids=np.array(kept_ids, np.int32),
        sampling=_of_sample(sampling, 0, grammar is not None),
        max_tokens=max_tokens,
        stop_ids=tuple(dict.fromkeys((*eos_of_all, *sampling.stop_token_ids))),
        tenant=ask.tenant.index,
        weight=ask.tenant.weight,
        priority=ask.priority,
        cache_keys=_cache_keys(ask),
        stream_interval=stream_interval,
        # A processor sees all tokens before the one that is drawn, so the last step is committed.
        late_inputs=is_led or bool(sampling.logits_processors),
        pooling=ask.pooling,
        grammar=None if grammar is None else Grammar(text=grammar, min_tokens=sampling.min_tokens),
        thinking=thinking,
        adapter=ask.adapter,
    )
    return [first] + [
        replace(
            first,
            id=new_id(),
            sampling=_of_sample(sampling, i, grammar is not None),
            leader=first.id,
        )
        for i in range(1, sampling.num_samples)
    ]


def _cache_keys(ask: GenerateInput) -> tuple[str, ...]:
    """A salt is its tenant's own: another one with the same salt shares nothing with it. Keys and
    values under an adapter are others than without it."""
    tenant, salt = ask.tenant, ask.cache_salt
    scope = tenant.prefix_scope if salt is None else tenant.salt_scope
    keys = tuple(key for key in (scope, salt) if key is not None)
    # So many that no salt looks like them.
    return keys if ask.adapter is None else (*keys, "adapter", ask.adapter.id, ask.adapter.name)


def _of_sample(sampling: SamplingParams, index: int, has_grammar: bool) -> SamplingParams:
    """What the engine needs of sample `index`; stop strings and counts stay on this side."""
    is_plain = sampling.num_samples == 1 and not sampling.stop and sampling.best_of is None
    if is_plain and not has_grammar:
        return sampling  # as it is
    ranks_samples = sampling.num_samples > sampling.n
    return replace(
        sampling,
        n=1,
        best_of=None,
        stop=(),
        min_tokens=0 if has_grammar else sampling.min_tokens,  # the grammar has them
        guided_decoding=None,
        seed=None if sampling.seed is None else _wrapped(sampling.seed + index),
        logprobs=0 if ranks_samples and sampling.logprobs is None else sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
    )


def _wrapped(seed: int) -> int:
    """Within signed 64 bits, so that the largest seed has a successor."""
    return (seed + 2**63) % 2**64 - 2**63


def _truncated(ids: Sequence[int], num_kept: int | None) -> tuple[int, ...]:
    if num_kept is None:
        return tuple(ids)
    if num_kept < 1:
        raise RequestError(
            "invalid_value",
            f"truncate_prompt_tokens is {num_kept}, it must be at least 1, or -1 for all that fit",
            "truncate_prompt_tokens",
        )
    return tuple(ids[-num_kept:])


def _check_task(ask: GenerateInput, info: EngineInfo) -> None:
    """Who scores by its logits can also talk."""
    tasks = {Task.GENERATE, Task.SCORE}
    if ask.pooling is not None:
        tasks = {Task.SCORE} if ask.pooling.token_ids else {Task.EMBED}
    if info.task not in tasks:
        raise RequestError(
            "unsupported",
            f"the model is served to {info.task.value}; start the server with --task "
            f"{min(tasks).value} for this",
            "model",
        )


def _check_prompt(ids: tuple[int, ...], info: EngineInfo) -> None:
    if not ids:
        raise RequestError(
            "invalid_value", "the prompt is empty; send at least one token", "prompt"
        )
    _check_ids("prompt", ids, info.vocab_size)
    if len(ids) >= info.max_seq_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(ids)} tokens; with one token of output at most "
            f"{info.max_seq_len - 1} fit in max_seq_len {info.max_seq_len}; shorten the prompt, "
            "set truncate_prompt_tokens or raise max_seq_len",
            "prompt",
        )
    if len(ids) > info.max_num_tokens and not info.chunked_prefill:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(ids)} tokens, one step computes at most max_num_tokens "
            f"{info.max_num_tokens}; shorten the prompt, raise max_num_tokens or set "
            "enable_chunked_prefill: true",
            "prompt",
        )


def _check_sampling(sampling: SamplingParams, info: EngineInfo) -> None:
    _check_ids("logit_bias", sampling.logit_bias, info.vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), info.vocab_size)
    _check_ids("logprob_token_ids", sampling.logprob_token_ids, info.vocab_size)
    for word in sampling.bad_words_token_ids:
        _check_ids("bad_words", word, info.vocab_size)
    for name in sampling.logits_processors:
        if name not in info.logits_processors:
            known = ", ".join(info.logits_processors) or "none"
            raise RequestError(
                "invalid_value",
                f"logits_processors names '{name}', this server has {known}; list it in the "
                "setting logits_processors",
                "logits_processors",
            )
    for text in sampling.stop:
        if len(text) > MAX_STOP_STRING_CHARS:
            raise RequestError(
                "invalid_value",
                f"a stop string has {len(text)} characters, at most {MAX_STOP_STRING_CHARS} are "
                "searched for",
                "stop",
            )
    if sampling.num_samples > info.max_queued:
        raise RequestError(
            "invalid_value",
            f"{sampling.num_samples} samples asked, at most {info.max_queued} requests may be "
            "open; ask for fewer or raise max_queued_requests",
            "n" if sampling.best_of is None else "best_of",
        )


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids:
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                "invalid_value",
                f"{name} holds token id {token_id}, the vocabulary is 0..{vocab_size - 1}",
                name,
            )
