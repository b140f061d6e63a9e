"""Gets the answers to examples: from an engine of our own, or from a server over HTTP.

Always greedy, all examples at once.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track

from penstock.api.llm import LLM
from penstock.config.schema import EngineConfig
from penstock.errors import BackendError
from penstock.eval.task import Answer, Example, answer_of_message, answer_of_output
from penstock.types.request import ChatOptions
from penstock.types.sampling import SamplingParams

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 500


def ask_engine(config: EngineConfig, examples: Sequence[Example], max_tokens: int) -> list[Answer]:
    options = [
        ChatOptions(template_kwargs=example.template_kwargs, tools=example.tools)
        for example in examples
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with LLM(**config.model_dump(exclude_unset=True)) as llm:
        outputs = llm.chat([example.messages for example in examples], sampling, options)
    assert isinstance(outputs, list)
    return [answer_of_output(output.outputs[0]) for output in outputs]


class ServerError(BackendError):
    """The server cannot be reached, or answers with something else than an answer."""


class Endpoint:
    """One OpenAI-compatible server; `model` None takes the first that it lists."""

    def __init__(self, url: str, model: str | None, api_key: str | None, concurrency: int) -> None:
        url = url if "://" in url else f"http://{url}"
        self._url = url.rstrip("/").removesuffix("/v1")
        self._concurrency = concurrency
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=concurrency),
        )
        self.model = model or self._first_model()

    def ask(self, examples: Sequence[Example], max_tokens: int) -> list[Answer]:
        console = Console(stderr=True)
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            answers = pool.map(lambda example: self._ask(example, max_tokens), examples)
            return list(
                track(
                    answers,
                    "examples",
                    total=len(examples),
                    console=console,
                    disable=not console.is_terminal,
                )
            )
        finally:
            pool.shutdown(cancel_futures=True)

    def _first_model(self) -> str:
        listed = self._send("GET", "/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError(f"{self._url} lists no model; name one with --model") from None

    def _ask(self, example: Example, max_tokens: int) -> Answer:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": example.messages,
            "temperature": 0.0,
            "max_tokens": max_tokens,
        }
        if example.tools:
            body["tools"] = example.tools
        if example.template_kwargs:
            body["chat_template_kwargs"] = example.template_kwargs
        reply = self._send("POST", "/chat/completions", body)
        try:
            return answer_of_message(reply["choices"][0]["message"])
        except (LookupError, TypeError, AttributeError):
            raise ServerError(f"{self._url} sent a reply without a message: {reply}") from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer from {self._url}: {error}") from None
        if not response.is_success:
            text = response.text[:_MAX_ERROR_CHARS]
            raise ServerError(f"{self._url}/v1{path} answers {response.status_code}: {text}")
        try:
            return response.json()
        except ValueError:
            raise ServerError(f"{self._url}/v1{path} sent something that is not JSON") from None
