"""The body of `POST /v1/batches`."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.server.openai.requests.schema import Strict

Short = Annotated[str, Field(max_length=512)]


class BatchRequest(Strict):
    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Short], Field(max_length=16)] | (
        None
    ) = None
