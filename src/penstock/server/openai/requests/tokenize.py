"""The bodies of `POST /tokenize` and `POST /detokenize`."""

from typing import Any, Self

from pydantic import model_validator

from penstock.errors import RequestError
from penstock.server.openai.requests.chat import Messages, OwnTemplate, Tools
from penstock.server.openai.requests.schema import Strict, TokenIds
from penstock.types.request import ChatOptions, GenerateInput


class TokenizeRequest(Strict):
    """Exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # null: as for generating
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools | None = None
    chat_template: OwnTemplate | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("missing_field", "give one of prompt and messages", "prompt")
        return self

    def prompt_input(self) -> GenerateInput:
        is_text = self.prompt is not None
        special = is_text if self.add_special_tokens is None else self.add_special_tokens
        return GenerateInput(
            text=self.prompt,
            messages=None if self.messages is None else tuple(self.messages),
            chat=ChatOptions(
                add_generation_prompt=self.add_generation_prompt
                and not self.continue_final_message,
                continue_final_message=self.continue_final_message,
                template_kwargs=self.chat_template_kwargs or {},
                tools=tuple(self.tools or ()),
                template=self.chat_template,
            ),
            add_special_tokens=special,
        )


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
