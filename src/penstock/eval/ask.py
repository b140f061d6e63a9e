"""Gets the answers to examples: from an engine of our own, or from a server over HTTP.

Always greedy, all examples at once.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import httpx
from rich.console import Console
from rich.progress import track

from penstock.api.llm import LLM
from penstock.config.schema import EngineConfig
from penstock.errors import BackendError
from penstock.eval.likelihood import Chance, Weighed
from penstock.eval.task import Example, Response, response_of_message, response_of_output
from penstock.types.request import ChatOptions
from penstock.types.sampling import SamplingParams

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 500
_T = TypeVar("_T")
_R = TypeVar("_R")


class Engine:
    """An engine of our own, for as long as it is entered."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def __enter__(self) -> Self:
        self._llm = LLM(**self._config.model_dump(exclude_unset=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.shutdown()

    def ask(self, examples: Sequence[Example], max_tokens: int) -> list[Response]:
        """All of them chats, or all texts to go on with."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=example.stop)
            for example in examples
        ]
        if examples[0].prompt:
            outputs = self._llm.generate([example.prompt for example in examples], params)
            assert isinstance(outputs, list)
            return [Response(output.outputs[0].text) for output in outputs]
        options = [
            ChatOptions(template_kwargs=example.template_kwargs, tools=example.tools)
            for example in examples
        ]
        outputs = self._llm.chat([example.messages for example in examples], params, options)
        assert isinstance(outputs, list)
        return [response_of_output(output.outputs[0]) for output in outputs]

    def chances(self, asked: Sequence[Weighed]) -> list[list[Chance]]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self._llm.generate([one.ids for one in asked], params)
        assert isinstance(outputs, list)
        return [
            [
                Chance(token.logprob, token.rank == 1)
                for token in (output.prompt_logprobs or ())[one.begin :]
                if token is not None
            ]
            for one, output in zip(asked, outputs, strict=True)
        ]


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

    def ask(self, examples: Sequence[Example], max_tokens: int) -> list[Response]:
        return self._each(lambda example: self._ask(example, max_tokens), examples)

    def chances(self, asked: Sequence[Weighed]) -> list[list[Chance]]:
        return self._each(self._chances, asked)

    def _each(self, act: Callable[[_T], _R], things: Sequence[_T]) -> list[_R]:
        """Of all of them, so many at once as may be."""
        console = Console(stderr=True)
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            return list(
                track(
                    pool.map(act, things),
                    "examples",
                    total=len(things),
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

    def _ask(self, example: Example, max_tokens: int) -> Response:
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0.0,
            "max_tokens": max_tokens,
        }
        if example.stop:
            body["stop"] = example.stop
        if example.prompt:
            reply = self._send("POST", "/completions", body | {"prompt": example.prompt})
            return Response(str(self._found(reply, "choices", 0, "text")))
        body["messages"] = example.messages
        if example.tools:
            body["tools"] = example.tools
        if example.template_kwargs:
            body["chat_template_kwargs"] = example.template_kwargs
        reply = self._send("POST", "/chat/completions", body)
        try:
            return response_of_message(self._found(reply, "choices", 0, "message"))
        except (LookupError, TypeError, AttributeError):
            raise ServerError(f"{self._url} sent a reply without a message: {reply}") from None

    def _chances(self, asked: Weighed) -> list[Chance]:
        body = {"model": self.model, "prompt": asked.ids, "echo": True, "logprobs": 1}
        reply = self._send("POST", "/completions", body | {"max_tokens": 1, "temperature": 0.0})
        found = self._found(reply, "choices", 0, "logprobs", "token_logprobs")
        best = self._found(reply, "choices", 0, "logprobs", "top_logprobs")
        if min(len(found), len(best)) < len(asked.ids):
            raise ServerError(f"{self._url} does not echo log-probabilities of the prompt")
        return [
            Chance(found[i], found[i] >= max(best[i].values()))
            for i in range(asked.begin, len(asked.ids))
        ]

    def _found(self, reply: Any, *path: str | int) -> Any:
        found = reply
        try:
            for step in path:
                found = found[step]
        except (LookupError, TypeError):
            raise ServerError(f"{self._url} sent a reply without a {path[-1]}: {reply}") from None
        return found

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
