"""The client of `penstock chat`: one conversation with one OpenAI-compatible server, over HTTP.

Writes responses to the file it is given; knows nothing of keys, prompts and commands.
"""

import gc
import json
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, TextIO

import httpx

from penstock.cli.wrap import Plain, Wrapped, writer
from penstock.errors import PenstockError

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 2000
_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"


class ChatError(PenstockError):
    """The server cannot be reached or refused; the message says which."""


class Server:
    """One OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = self._connect()

    def _connect(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"{self.url}/v1",
            headers=self._headers,
            # The first token may take long: the server may be busy, or the prompt be large.
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        )

    def hang_up(self) -> None:
        """After Ctrl+C, which may have struck where a connection is left open and forgotten."""
        self._client.close()
        self._client = self._connect()
        gc.collect()

    def first_model(self) -> str:
        try:
            response = self._client.get("/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        _check(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ChatError(f"{self.url} answers, but names no model; set --model") from None

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Chunks of one chat completion; closing the iterator tells the server to stop."""
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                _check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield _parse(text)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatError(
                f"no server at {self.url}; start one with 'penstock serve' or set --url"
            )
        return ChatError(f"the connection to {self.url} broke: {error}")


class Conversation:
    """The messages so far, and how responses are asked for."""

    def __init__(self, server: Server, model: str, system: str | None, **options: Any) -> None:
        self._server = server
        self._options = {"model": model, **options}
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def take_over(self, messages: list[dict[str, str]]) -> None:
        """Go on where another conversation ended, under its system message."""
        self.messages = messages
        first = messages[0] if messages else {"role": "user"}
        self.system = first["content"] if first["role"] == "system" else None

    def turn(self, text: str, out: TextIO) -> str:
        """Write the response to `out` as it arrives; return a line about its speed.

        What a broken or stopped response said until then stays in the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        response = ""
        num_tokens, num_pieces, finish = 0, 0, None
        started = first = time.perf_counter()
        shown = _Shown(writer(out))
        chunks = self._server.stream(
            {
                "messages": self.messages,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._options,
            }
        )
        try:
            for chunk in chunks:
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    content = delta.get("content") or ""
                    reasoning = delta.get("reasoning_content") or ""
                    if reasoning or content:
                        first = first if num_pieces else time.perf_counter()
                        num_pieces += 1
                        response += content
                        shown.write(reasoning, content)
                    finish = choice.get("finish_reason") or finish
        except KeyboardInterrupt:
            finish = "stopped"
        finally:
            chunks.close()
            if finish == "stopped":
                self._server.hang_up()
            shown.end()
            if response:
                self.messages.append({"role": "assistant", "content": response})
            else:
                self.messages.pop()
        return _summary(num_tokens or num_pieces, first - started, first, finish)


class _Shown:
    """Reasoning and response one after the other; on a terminal the reasoning are dim."""

    def __init__(self, out: Plain | Wrapped) -> None:
        self._out = out
        self._is_thinking = False

    def write(self, reasoning: str, content: str) -> None:
        if reasoning and not self._is_thinking:
            self._out.escape(_DIM)
            self._is_thinking = True
        self._out.write(reasoning)
        if content and self._is_thinking:
            self._stop_thinking()
            self._out.write("\n\n")
        self._out.write(content)
        self._out.flush()

    def end(self) -> None:
        """The last word, and the terminal writes normally again."""
        self._stop_thinking()
        self._out.end()

    def _stop_thinking(self) -> None:
        if self._is_thinking:
            self._out.escape(_NORMAL)
            self._is_thinking = False


def _summary(num_tokens: int, first_s: float, first: float, finish: str | None) -> str:
    """The first token waits for the prompt, so speed is counted from there on."""
    took = time.perf_counter() - first
    speed = f", {(num_tokens - 1) / took:.1f} tokens/s" if num_tokens > 1 and took > 0 else ""
    why = "" if finish in (None, "stop") else f", {finish}"
    return f"{num_tokens} tokens{speed}, first after {first_s:.2f} s{why}"


def _parse(text: str) -> dict[str, Any]:
    try:
        chunk = json.loads(text)
    except ValueError:
        raise ChatError(f"the server sent something that is not JSON: {text[:200]}") from None
    if not isinstance(chunk, dict):
        raise ChatError(f"the server sent something that is no chunk: {text[:200]}")
    if error := chunk.get("error"):
        raise ChatError(str(error.get("message", error) if isinstance(error, dict) else error))
    return chunk


def _check(response: httpx.Response) -> None:
    """A refusal becomes one line with what the server said about it."""
    if response.is_success:
        return
    text = response.read()[:_MAX_ERROR_CHARS].decode(errors="replace")
    message: object = text
    with suppress(ValueError):
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        message = error.get("message", error) if isinstance(error, dict) else error
    raise ChatError(f"the server refused ({response.status_code}): {message}")
