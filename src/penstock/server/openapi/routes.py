"""What each route is for, takes and returns; `document` joins it with the routes there are.

A route without an entry is described by the first line of its endpoint's docstring.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.server.anthropic.reply import EVENTS as MESSAGE_EVENTS
from penstock.server.anthropic.reply import Message, TokenCount
from penstock.server.anthropic.requests import CountTokensRequest, MessagesRequest
from penstock.server.batches.records import (
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
)
from penstock.server.openai import reply
from penstock.server.openai.models import ModelCard
from penstock.server.openai.pooling import EmbeddingResponse, RerankResponse, ScoreResponse
from penstock.server.openai.requests.batches import BatchRequest
from penstock.server.openai.requests.chat import ChatRequest
from penstock.server.openai.requests.completions import CompletionRequest
from penstock.server.openai.requests.lora import LoadLora, UnloadLora
from penstock.server.openai.requests.pooling import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from penstock.server.openai.requests.responses import ResponsesRequest
from penstock.server.openai.requests.schema import Strict
from penstock.server.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from penstock.server.openai.responses.records import (
    EVENTS,
    InputItemList,
    ResponseDeleted,
    ResponseObject,
)
from penstock.server.openai.tokenize import Tokens
from penstock.server.openapi.shapes import (
    AnthropicError,
    Detokenized,
    ErrorResponse,
    ModelList,
    ServerSummary,
    Status,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteText:
    """`request`: the schema that checks the body. `form`: names of the fields of a form instead.
    `response`: a record for JSON, else a media type. `events`: kinds that a stream sends.
    `errors`: statuses beside those that every route may have, told as `error_record`."""

    summary: str
    group: str = "server"
    request: type[Strict] | None = None
    form: tuple[str, ...] = ()
    response: type | str = "application/json"
    events: tuple[type, ...] = ()
    query: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    error_record: type = ErrorResponse


_ASK = (400, 413, 429, 503)  # of requests that go to the engine
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_CHAT = {"messages": _MESSAGES, "max_tokens": 64}
_FILE_ID = "file-0123456789abcdef0123456789abcdef"

PATH_PARAMETERS = {
    "model": "Name of a model.",
    "file_id": "Id of a file.",
    "batch_id": "Id of a batch.",
    "response_id": "Id of a stored response.",
}
QUERY_PARAMETERS: Mapping[str, tuple[dict[str, Any], str]] = {
    "limit": ({"type": "integer", "minimum": 1, "maximum": 10_000}, "Most entries to return."),
    "after": ({"type": "string"}, "Id of the last entry of the page before."),
    "order": ({"enum": ["asc", "desc"], "default": "desc"}, "By time of creation."),
    "purpose": ({"enum": ["batch", "batch_output"]}, "Only files of this purpose."),
}

ROUTES: Mapping[tuple[str, str], RouteText] = {
    ("POST", "/v1/chat/completions"): RouteText(
        summary="The next message of a conversation, whole or as a stream",
        group="generation",
        request=ChatRequest,
        response=reply.ChatResponse,
        events=(reply.ChatChunk,),
        errors=_ASK,
        example=_CHAT,
    ),
    ("POST", "/v1/completions"): RouteText(
        summary="What comes after one or many prompts, whole or as a stream",
        group="generation",
        request=CompletionRequest,
        response=reply.CompletionResponse,
        events=(reply.CompletionResponse,),
        errors=_ASK,
        example={"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0},
    ),
    ("POST", "/v1/responses"): RouteText(
        summary="The next response of a conversation, whole, as a stream or in the background",
        group="generation",
        request=ResponsesRequest,
        response=ResponseObject,
        events=EVENTS,
        errors=(*_ASK, 404),
        example={"input": "What is the capital of France?", "max_output_tokens": 64},
    ),
    ("GET", "/v1/responses/{response_id}"): RouteText(
        summary="A stored response", group="responses", response=ResponseObject, errors=(400, 404)
    ),
    ("DELETE", "/v1/responses/{response_id}"): RouteText(
        summary="Delete a stored response",
        group="responses",
        response=ResponseDeleted,
        errors=(404,),
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): RouteText(
        summary="End a response in the background",
        group="responses",
        response=ResponseObject,
        errors=(400, 404),
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): RouteText(
        summary="The conversation that a stored response was made from",
        group="responses",
        response=InputItemList,
        query=("limit", "after", "order"),
        errors=(400, 404),
    ),
    ("POST", "/v1/messages"): RouteText(
        summary="The next message of a conversation, in Anthropic's form, whole or as a stream",
        group="generation",
        request=MessagesRequest,
        response=Message,
        events=MESSAGE_EVENTS,
        errors=_ASK,
        example=_CHAT,
        error_record=AnthropicError,
    ),
    ("POST", "/v1/messages/count_tokens"): RouteText(
        summary="The number of tokens of such a conversation",
        group="generation",
        request=CountTokensRequest,
        response=TokenCount,
        errors=(400, 413, 429),
        example={"messages": _MESSAGES},
        error_record=AnthropicError,
    ),
    ("POST", "/v1/embeddings"): RouteText(
        summary="A vector for each text; of a model that is served to embed",
        group="pooling",
        request=EmbeddingRequest,
        response=EmbeddingResponse,
        errors=_ASK,
        example={"input": ["The capital of France is Paris."], "encoding_format": "float"},
    ),
    **{
        ("POST", path): RouteText(
            summary="How well pairs of texts fit; of a model that is served to embed or score",
            group="pooling",
            request=ScoreRequest,
            response=ScoreResponse,
            errors=_ASK,
            example={"text_1": "Where is Paris?", "text_2": ["In France.", "A fox runs."]},
        )
        for path in ("/v1/score", "/score")
    },
    **{
        ("POST", path): RouteText(
            summary="Documents by how well they fit a query, the best first",
            group="pooling",
            request=RerankRequest,
            response=RerankResponse,
            errors=_ASK,
            example={"query": "Where is Paris?", "documents": ["A fox runs.", "In France."]},
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    },
    ("POST", "/tokenize"): RouteText(
        summary="Token ids of a text or a conversation",
        group="generation",
        request=TokenizeRequest,
        response=Tokens,
        errors=(400, 413, 429),
        example={"prompt": "The capital of France", "return_token_strs": True},
    ),
    ("POST", "/detokenize"): RouteText(
        summary="The text of token ids",
        group="generation",
        request=DetokenizeRequest,
        response=Detokenized,
        errors=(400, 413, 429),
        example={"tokens": [1, 2, 3]},
    ),
    ("GET", "/v1/models"): RouteText(
        summary="The served model and its adapters", response=ModelList
    ),
    ("GET", "/v1/models/{model}"): RouteText(
        summary="The served model, or an adapter, by its name", response=ModelCard, errors=(404,)
    ),
    ("POST", "/v1/load_lora_adapter"): RouteText(
        summary="Serve an adapter from a folder of the server's machine",
        request=LoadLora,
        response="text/plain",
        errors=(*_ASK, 403),
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    ("POST", "/v1/unload_lora_adapter"): RouteText(
        summary="Serve an adapter no longer",
        request=UnloadLora,
        response="text/plain",
        errors=(400, 403, 404),
        example={"lora_name": "sql"},
    ),
    ("POST", "/v1/files"): RouteText(
        summary="Upload a file for a batch",
        group="batches",
        form=("file", "purpose"),
        response=FileObject,
        errors=(400, 408, 413, 429, 507),
    ),
    ("GET", "/v1/files"): RouteText(
        summary="Files of this key, the newest first",
        group="batches",
        response=FileList,
        query=("limit", "after", "order", "purpose"),
        errors=(400,),
    ),
    ("GET", "/v1/files/{file_id}"): RouteText(
        summary="A file, without its content", group="batches", response=FileObject, errors=(404,)
    ),
    ("DELETE", "/v1/files/{file_id}"): RouteText(
        summary="Delete a file", group="batches", response=FileDeleted, errors=(400, 404)
    ),
    ("GET", "/v1/files/{file_id}/content"): RouteText(
        summary="The content of a file",
        group="batches",
        response="application/jsonl",
        errors=(404,),
    ),
    ("POST", "/v1/batches"): RouteText(
        summary="Run the requests of a file behind the others",
        group="batches",
        request=BatchRequest,
        response=BatchObject,
        errors=(400, 404),
        example={
            "input_file_id": _FILE_ID,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    ),
    ("GET", "/v1/batches"): RouteText(
        summary="Batches of this key, the newest first",
        group="batches",
        response=BatchList,
        query=("limit", "after"),
        errors=(400,),
    ),
    ("GET", "/v1/batches/{batch_id}"): RouteText(
        summary="A batch and how far it is", group="batches", response=BatchObject, errors=(404,)
    ),
    ("POST", "/v1/batches/{batch_id}/cancel"): RouteText(
        summary="End a batch; results up to now are kept",
        group="batches",
        response=BatchObject,
        errors=(404,),
    ),
    ("GET", "/"): RouteText(
        summary="What runs here; a page where HTML is accepted", response=ServerSummary
    ),
    ("GET", "/health"): RouteText(
        summary="200 while the engine makes progress; needs no key", response=Status, errors=(503,)
    ),
    ("GET", "/health_generate"): RouteText(
        summary="The same, by a token through the engine", response=Status, errors=(429, 503)
    ),
    ("GET", "/version"): RouteText(
        summary="Version, limits, settings with reasons, memory, start-up times", response=Version
    ),
    ("GET", "/metrics"): RouteText(
        summary="Figures of the last engine steps; Prometheus text where text is accepted",
        errors=(403,),
    ),
    ("GET", "/prometheus/metrics"): RouteText(
        summary="Metrics for Prometheus", response="text/plain", errors=(403,)
    ),
    ("GET", "/openapi.json"): RouteText(summary="This description, for programs"),
    ("GET", "/docs"): RouteText(summary="This description, for people", response="text/html"),
    ("GET", "/favicon.ico"): RouteText(summary="There is none: 204", response=""),
}
