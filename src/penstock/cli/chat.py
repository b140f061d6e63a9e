"""`penstock chat`: talk to a running server from a terminal, over HTTP alone.

Input that is not a terminal is read one turn per line, so a conversation can be piped in.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, TextIO

import httpx

from penstock.errors import PenstockError

_HELP = """\
/help            this text
/reset           forget the conversation
/system TEXT     set the system message and forget the conversation; without TEXT remove it
/quit            leave (so does Ctrl+D)
Ctrl+C           stop the answer that is being written"""
_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 2000


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
    """The messages so far, and how answers are asked for."""

    def __init__(self, server: Server, model: str, system: str | None, **options: Any) -> None:
        self._server = server
        self._options = {"model": model, **options}
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, text: str, out: TextIO) -> str:
        """Write the answer to `out` as it arrives; return a line about its speed.

        What a broken or stopped answer said until then stays in the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        num_tokens, num_pieces, finish = 0, 0, None
        started = first = time.perf_counter()
        shown = _Shown(out.isatty())
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
                    if said := shown.of(delta.get("reasoning_content") or "", content):
                        first = first if num_pieces else time.perf_counter()
                        num_pieces += 1
                        answer += content
                        out.write(said)
                        out.flush()
                    finish = choice.get("finish_reason") or finish
        except KeyboardInterrupt:
            finish = "stopped"
        finally:
            chunks.close()
            if finish == "stopped":
                self._server.hang_up()
            if left_dim := shown.end():
                out.write(left_dim)
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
        return _summary(num_tokens or num_pieces, first - started, first, finish)


class _Shown:
    """Thoughts and answer one after the other; on a terminal the thoughts are dim."""

    def __init__(self, is_terminal: bool) -> None:
        self._dim, self._normal = ("\x1b[2m", "\x1b[22m") if is_terminal else ("", "")
        self._is_thinking = False

    def of(self, thoughts: str, content: str) -> str:
        begin = self._dim if thoughts and not self._is_thinking else ""
        self._is_thinking = self._is_thinking or bool(thoughts)
        if not content or not self._is_thinking:
            return begin + thoughts + content
        return f"{begin}{thoughts}{self.end()}\n\n{content}"

    def end(self) -> str:
        """What makes the terminal write normally again."""
        was_thinking, self._is_thinking = self._is_thinking, False
        return self._normal if was_thinking else ""


def run(args: argparse.Namespace) -> int:
    server = Server(args.url, args.api_key)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    model = args.model or server.first_model()
    conversation = Conversation(server, model, args.system, **options)
    if sys.stdin.isatty():
        return _interactive(conversation, f"{model} at {server.url}; /help lists the commands")
    return _piped(conversation)


def _interactive(conversation: Conversation, greeting: str) -> int:
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys and history in input()
    print(greeting)
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("  (/quit leaves)")
            continue
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line:
            try:
                print(f"\n[{conversation.turn(line, sys.stdout)}]")
            except ChatError as error:
                print(f"\nerror: {error}", file=sys.stderr)


def _piped(conversation: Conversation) -> int:
    """Answers go to stdout, everything about them to stderr; the first failure ends it."""
    for line in sys.stdin:
        line = line.strip()
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line:
            summary = conversation.turn(line, sys.stdout)
            print(flush=True)
            print(f"[{summary}]", file=sys.stderr)
    return 0


def _command(conversation: Conversation, line: str) -> bool:
    """Whether the chat goes on."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.system = rest.strip() or None
            conversation.reset()
        case "/help":
            print(_HELP, file=sys.stderr)
        case _:
            print(f"unknown command '{name}'; /help lists them", file=sys.stderr)
    return True


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
