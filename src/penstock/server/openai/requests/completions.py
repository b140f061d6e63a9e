"""The body of `POST /v1/completions`: one or many prompts, as texts or token ids."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from penstock.errors import RequestError
from penstock.server.openai.requests.generation import GenerationFields
from penstock.server.openai.requests.schema import (
    INT32_MAX,
    Count,
    Int32,
    TokenIds,
    shown,
    shown_as,
)
from penstock.types.request import GenerateInput

MAX_PROMPTS = 1024


def prompts(name: str) -> PlainValidator:
    """Of field `name`: str | [str] | [int] | [[int]] -> a list of texts or id lists, checked."""

    def bad(what: str) -> RequestError:
        return RequestError(
            "invalid_type",
            f"{name} must be a text, a list of texts, a list of token ids or a list of such lists; "
            f"{what}",
            name,
        )

    def check(value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
            value = [value]
        if not isinstance(value, list):
            raise bad(f"it is {shown(value)}")
        if not value:
            raise bad("it is empty")
        if len(value) > MAX_PROMPTS:
            raise RequestError(
                "invalid_value",
                f"{name} holds {len(value)} prompts, at most {MAX_PROMPTS} may come in one request",
                name,
            )
        for index, prompt in enumerate(value):
            if isinstance(prompt, str):
                continue
            if not isinstance(prompt, list) or set(map(type, prompt)) != {int}:
                raise bad(f"{name}[{index}] is {shown(prompt)}")
            if min(prompt) < 0 or max(prompt) > INT32_MAX:
                raise bad(f"{name}[{index}] holds a number that is no token id")
        return value

    return PlainValidator(check)


_SHOWN_IDS = Annotated[list[Count], Field(min_length=1)]
SHOWN_PROMPTS = shown_as(
    str
    | _SHOWN_IDS
    | Annotated[list[str | _SHOWN_IDS], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(GenerationFields):
    prompt: Annotated[list[str | TokenIds], prompts("prompt"), SHOWN_PROMPTS]
    logprobs: Int32 | None = None
    suffix: str | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "invalid_value",
                "max_tokens is 0, it must be at least 1 unless echo is true",
                "max_tokens",
            )
        return self

    @property
    def echo_only(self) -> bool:
        """Score the prompt, generate nothing."""
        return self.max_tokens == 0

    def inputs(self, defaults: Mapping[str, Any]) -> list[GenerateInput]:
        """`defaults`: the model's own sampling parameters."""
        changes: dict[str, Any] = {"logprobs": self.logprobs}
        if self.echo_only:
            changes |= {"max_tokens": 1, "min_tokens": 0}  # a step samples one; it is dropped
        if self.echo and self.logprobs is not None:
            changes["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        sampling = self.sampling(defaults, **changes)
        return [
            GenerateInput(
                text=prompt if isinstance(prompt, str) else None,
                token_ids=tuple(prompt) if isinstance(prompt, list) else None,
                suffix=self.suffix or None,  # nothing behind it: as without
                sampling=sampling,
                add_special_tokens=self.add_special_tokens,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
            for prompt in self.prompt
        ]
