"""The bodies of `POST /v1/embeddings`, `/v1/score` and `/v1/rerank`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.errors import RequestError
from penstock.server.openai.requests.completions import MAX_PROMPTS, SHOWN_PROMPTS, prompts
from penstock.server.openai.requests.generation import Truncation
from penstock.server.openai.requests.schema import (
    Count,
    Int32,
    Strict,
    Texts,
    TokenIds,
    at_most,
    shown_as,
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_MANY_TEXTS = (
    Field(min_length=1),
    BeforeValidator(_as_list),
    shown_as(str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]),
)


class PooledFields(Strict):
    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Int32 = 0
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)

    def common(self) -> dict[str, Any]:
        """Fields of every input."""
        return {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
        }


class EmbeddingRequest(PooledFields):
    input: Annotated[list[str | TokenIds], prompts("input"), SHOWN_PROMPTS]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True


class ScoreRequest(PooledFields):
    text_1: Annotated[Texts, at_most("text_1", MAX_PROMPTS), *_MANY_TEXTS]
    text_2: Annotated[Texts, at_most("text_2", MAX_PROMPTS), *_MANY_TEXTS]
    instruction: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise RequestError(
                "invalid_value",
                f"text_1 holds {len(self.text_1)} texts and text_2 {len(self.text_2)}; send one, "
                "or as many",
                "text_1",
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        firsts = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(firsts, self.text_2, strict=True))


class RerankRequest(PooledFields):
    query: str
    documents: Annotated[Texts, at_most("documents", MAX_PROMPTS), *_MANY_TEXTS]
    top_n: Count | None = None
    return_documents: bool = True
    instruction: str | None = None
