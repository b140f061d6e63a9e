"""Inputs that ask for a vector or a score instead of text, and what their results mean.

Knows ids and numbers, and the prompt of one kind of reranker. Does not talk to the engine.
"""

import math
from typing import Any

import numpy as np

from penstock.errors import ConfigError, RequestError
from penstock.ipc.messages import EngineInfo
from penstock.text.tokenizer import Tokenizer
from penstock.types.pooling import Pooling, Task
from penstock.types.request import GenerateInput
from penstock.types.sampling import SamplingParams
from penstock.types.step import Float32s

# The step that reads the last prompt token samples one; it is dropped.
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# As Qwen3-Reranker was trained.
_JUDGE_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_VERDICTS = ("yes", "no")


def need_task(info: EngineInfo, *tasks: Task) -> None:
    if info.task not in tasks:
        raise RequestError(
            "unsupported",
            f"the model is served to {info.task.value}; start the server with --task "
            f"{' or '.join(one.value for one in tasks)} for this endpoint",
            "model",
        )


def embed_input(text_or_ids: str | list[int], **fields: Any) -> GenerateInput:
    is_text = isinstance(text_or_ids, str)
    return GenerateInput(
        text=text_or_ids if isinstance(text_or_ids, str) else None,
        token_ids=None if is_text else tuple(text_or_ids),  # type: ignore[arg-type]
        sampling=SAMPLING,
        pooling=Pooling(),
        **fields,
    )


def embedding(
    pooled: bytes, info: EngineInfo, dimensions: int | None = None, normalize: bool | None = None
) -> Float32s:
    """The first `dimensions` of a hidden state, of length 1 where that is asked or usual."""
    vector = np.frombuffer(pooled, np.float32)[:dimensions]
    if not (info.normalizes if normalize is None else normalize):
        return vector
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def check_dimensions(dimensions: int | None, info: EngineInfo) -> None:
    if dimensions is not None and not 1 <= dimensions <= info.hidden_size:
        raise RequestError(
            "invalid_value",
            f"dimensions is {dimensions}, embeddings have 1 to {info.hidden_size}",
            "dimensions",
        )


def judge_input(
    query: str, document: str, instruction: str | None, tokenizer: Tokenizer | None, **fields: Any
) -> GenerateInput:
    """The model says whether the document fits; asked are the logits of "yes" and "no"."""
    if tokenizer is None:
        raise RequestError("no_tokenizer", "scores need a tokenizer", "model")
    text = _JUDGE_PROMPT.format(
        instruction=instruction or DEFAULT_INSTRUCTION, query=query, document=document
    )
    token_ids = tuple(
        int(tokenizer.encode(word, add_special_tokens=False)[0]) for word in _VERDICTS
    )
    return GenerateInput(
        text=text, sampling=SAMPLING, pooling=Pooling(token_ids=token_ids), **fields
    )


def judged(pooled: bytes) -> float:
    """How likely "yes" is against "no"."""
    yes, no = np.frombuffer(pooled, np.float32).tolist()
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def check_judge(tokenizer: Tokenizer) -> None:
    """At start: a model that has no token for a verdict would refuse every pair."""
    for word in _VERDICTS:
        if (num := len(tokenizer.encode(word, add_special_tokens=False))) != 1:
            raise ConfigError(
                f"task is score, but '{word}' is {num} tokens of this model; scores by one token "
                "are those of models like Qwen3-Reranker; embed scores any model by cosine"
            )
