"""`POST /tokenize` and `/detokenize`: tokenizer and template as generating uses them."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.server.body import read_body
from penstock.server.openai.requests.schema import parse
from penstock.server.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.server.state import state_of
from penstock.types.request import GenerateInput

_NUM_QUICK_IDS = 1024
_MIN_IDS = 1 << 16  # to turn back at a time, however little the engine can read


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    asked, given = await read_body(request, _read)
    ids, _ = await state.pipeline.tokenize(given)
    max_seq_len, names = state.pipeline.client.info.max_seq_len, state.names

    def reply() -> bytes:
        strs = [names.name(one) for one in ids] if asked.return_token_strs else None
        tokens = Tokens(count=len(ids), max_model_len=max_seq_len, tokens=ids, token_strs=strs)
        return msgspec.json.encode(tokens)

    content = reply() if len(ids) <= _NUM_QUICK_IDS else await asyncio.to_thread(reply)
    return Response(content, media_type="application/json")


def _read(body: Any) -> tuple[TokenizeRequest, GenerateInput]:
    asked = parse(TokenizeRequest, body)
    return asked, asked.prompt_input()


async def detokenize(request: Request) -> Response:
    pipeline = state_of(request).pipeline
    info = pipeline.client.info
    asked = await read_body(request, lambda body: parse(DetokenizeRequest, body))
    if len(asked.tokens) > (limit := max(info.max_seq_len, _MIN_IDS)):
        raise RequestError(
            "invalid_value",
            f"tokens holds {len(asked.tokens)} ids, at most {limit} are read at a time; send parts",
            "tokens",
        )
    if asked.tokens and max(asked.tokens) >= info.vocab_size:
        raise RequestError(
            "invalid_value",
            f"tokens holds {max(asked.tokens)}, the vocabulary is 0..{info.vocab_size - 1}",
            "tokens",
        )
    text = await pipeline.detokenize(asked.tokens, asked.skip_special_tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
