"""`POST /tokenize` and `/detokenize`: tokenizer and template as generating uses them."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import RequestError
from penstock.server.body import read_json
from penstock.server.openai.protocol import DetokenizeRequest, TokenizeRequest, parse
from penstock.server.state import state_of


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | None = None


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    asked = parse(TokenizeRequest, await read_json(request))
    ids, _ = await state.pipeline.tokenize(asked.prompt_input())
    reply = Tokens(
        count=len(ids),
        max_model_len=state.pipeline.client.info.max_seq_len,
        tokens=ids,
        token_strs=[state.names.name(one) for one in ids] if asked.return_token_strs else None,
    )
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def detokenize(request: Request) -> Response:
    pipeline = state_of(request).pipeline
    asked = parse(DetokenizeRequest, await read_json(request))
    vocab_size = pipeline.client.info.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        raise RequestError(
            "invalid_value",
            f"tokens holds {max(asked.tokens)}, the vocabulary is 0..{vocab_size - 1}",
            "tokens",
        )
    text = pipeline.detokenize(asked.tokens, asked.skip_special_tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
