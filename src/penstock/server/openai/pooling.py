"""`POST /v1/embeddings`, `/v1/score`, `/v1/rerank`: texts in, vectors or scores out."""

import asyncio
import base64
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.frontend.pooling import (
    check_dimensions,
    embed_input,
    embedding,
    judge_input,
    judged,
    need_task,
)
from penstock.server.access_log import tell_access_log
from penstock.server.adapters import with_adapter
from penstock.server.auth import on_behalf, tenant_of
from penstock.server.body import read_body
from penstock.server.generations import Generations
from penstock.server.openai.reply import PromptDetails, new_id
from penstock.server.openai.requests.pooling import (
    EmbeddingRequest,
    PooledFields,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.openai.requests.schema import parse
from penstock.server.sse import until_disconnect
from penstock.server.state import state_of
from penstock.types.pooling import Task
from penstock.types.request import GenerateInput

_NUM_QUICK_FLOATS = 1 << 14


class PooledUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PooledUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class Document(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    document: Document | UnsetType = UNSET
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: PooledUsage
    results: list[RerankResult]


async def embeddings(request: Request) -> Response:
    info = state_of(request).pipeline.client.info
    asked = await read_body(request, partial(parse, EmbeddingRequest))
    need_task(info, Task.EMBED)
    check_dimensions(asked.dimensions, info)
    fields = asked.common() | {"add_special_tokens": asked.add_special_tokens}
    inputs = [embed_input(one, **fields) for one in asked.input]
    name = new_id("embd")
    model, pooled, usage = await _pooled(request, name, asked, inputs)

    def reply() -> bytes:
        vectors = [embedding(one, info, asked.dimensions, asked.normalize) for one in pooled]
        return msgspec.json.encode(
            EmbeddingResponse(
                id=name,
                created=int(time.time()),
                model=model,
                data=[
                    Embedding(
                        index=index,
                        embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode()
                        if asked.encoding_format == "base64"
                        else vector.tolist(),
                    )
                    for index, vector in enumerate(vectors)
                ],
                usage=usage,
            )
        )

    is_quick = len(pooled) * info.hidden_size <= _NUM_QUICK_FLOATS
    content = reply() if is_quick else await asyncio.to_thread(reply)
    return Response(content, media_type="application/json")


async def score(request: Request) -> Response:
    asked = await read_body(request, partial(parse, ScoreRequest))
    name = new_id("score")
    model, scores, usage = await _scores(request, name, asked, asked.pairs, asked.instruction)
    reply = ScoreResponse(
        id=name,
        created=int(time.time()),
        model=model,
        data=[Score(index=index, score=one) for index, one in enumerate(scores)],
        usage=usage,
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def rerank(request: Request) -> Response:
    asked = await read_body(request, partial(parse, RerankRequest))
    name = new_id("rerank")
    pairs = [(asked.query, one) for one in asked.documents]
    model, scores, usage = await _scores(request, name, asked, pairs, asked.instruction)
    best = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)
    results = [
        RerankResult(
            index=index,
            document=Document(asked.documents[index]) if asked.return_documents else UNSET,
            relevance_score=scores[index],
        )
        for index in best[: asked.top_n or len(best)]
    ]
    reply = RerankResponse(id=name, model=model, usage=usage, results=results)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _scores(
    request: Request,
    name: str,
    asked: PooledFields,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
) -> tuple[str, list[float], PooledUsage]:
    """Of each pair: how likely "yes" is, or the cosine of their embeddings; first the name of the
    model."""
    pipeline = state_of(request).pipeline
    info = pipeline.client.info
    need_task(info, Task.EMBED, Task.SCORE)
    if info.task is Task.SCORE:
        inputs = [
            judge_input(*pair, instruction, pipeline.tokenizer, **asked.common()) for pair in pairs
        ]
        model, pooled, usage = await _pooled(request, name, asked, inputs)
        return model, [judged(one) for one in pooled], usage
    begin = f"Instruct: {instruction}\nQuery:" if instruction else ""  # as Qwen3-Embedding has it
    pairs = [(begin + first, second) for first, second in pairs]
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    inputs = [embed_input(text, **asked.common()) for text in texts]
    model, pooled, usage = await _pooled(request, name, asked, inputs)
    vectors = {
        text: embedding(one, info, normalize=True) for text, one in zip(texts, pooled, strict=True)
    }
    cosines = [float(np.dot(vectors[first], vectors[second])) for first, second in pairs]
    return model, cosines, usage


async def _pooled(
    request: Request, name: str, asked: PooledFields, inputs: list[GenerateInput]
) -> tuple[str, list[bytes], PooledUsage]:
    """What runs, the model or an adapter by its name, and what it made of each input."""
    inputs = on_behalf(tenant_of(request), inputs)
    state, inputs = await with_adapter(state_of(request), inputs, asked.model)
    generations = await Generations.start(
        state.pipeline, inputs, state.metrics.observe, stream=False
    )
    tell_access_log(request.scope, name, generations)
    async with aclosing(generations):
        found = await until_disconnect(request.receive, generations.collect())
    counts = generations.usage()
    usage = PooledUsage(
        prompt_tokens=counts.prompt_tokens,
        total_tokens=counts.prompt_tokens,
        prompt_tokens_details=PromptDetails(counts.cached_tokens),
    )
    return state.model_name, [sample.pooled for [sample] in found], usage
