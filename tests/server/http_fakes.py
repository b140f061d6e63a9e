"""A pipeline without an engine: answers at once, slowly or not at all, as the prompt says."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import tokenizers

from penstock.config.schema import EngineConfig
from penstock.errors import CapacityError, RequestError
from penstock.frontend.capacity import Capacity
from penstock.frontend.generation import OnBug, OnText
from penstock.ipc.messages import EngineInfo
from penstock.server.app import build_app
from penstock.server.drain import Drain
from penstock.server.http_server import HttpServer
from penstock.server.launch import bind
from penstock.text.chat import SIMPLE_TEMPLATE, ChatTemplate
from penstock.text.chat_format import ChatFormat
from penstock.text.tokenizer import Tokenizer, check_length
from penstock.types.outputs import TextDelta, TokenLogprob
from penstock.types.request import FinishReason, GenerateInput
from penstock.types.setting_choice import SettingChoice
from penstock.types.stats import EngineCounters, IterationStats

OUTPUT = "Once upon a time, in the café, there was a €."
MAX_SEQ_LEN = 4096

INFO = EngineInfo(
    max_seq_len=MAX_SEQ_LEN,
    max_num_tokens=2048,
    max_batch_size=64,
    max_queued=256,
    chunked_prefill=True,
    vocab_size=257,
    total_blocks=100,
    tokens_per_block=16,
    eos_token_ids=(256,),
    device="cpu",
    config={"dtype": "float32", "max_batch_size": 64},
    choices=(SettingChoice(name="dtype", value="float32", reason="default on a CPU"),),
    memory={"weights": 2**30, "cache": 2**31},
    rank_weight_bytes=(2**30,),
    timeline=(("load weights", 1.5), ("warm up", 0.5)),
)


# With a place for tools and documents, in which it writes nothing of them.
TEMPLATE = "{% if tools or documents %}{% endif %}" + SIMPLE_TEMPLATE


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token per byte, and <eos>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, {"default": template})


def iteration(number: int) -> IterationStats:
    return IterationStats(
        iter=number,
        timestamp=1.0,
        latency_ms=2.5,
        num_active=3,
        num_queued=1,
        num_scheduled=2,
        num_context=1,
        num_generation=1,
        num_context_tokens=10,
        used_blocks=4,
        free_blocks=96,
        max_blocks=100,
        tokens_per_block=16,
        new_blocks=3,
        reused_blocks=1,
        missed_blocks=3,
        gpu_mem_bytes=1 << 30,
    )


class FakeClient:
    def __init__(self) -> None:
        self.info = INFO
        self.capacity = Capacity()
        self.healthy = True
        self.counters = EngineCounters(
            steps=7,
            prompt_tokens=11,
            generated_tokens=13,
            running=2,
            used_blocks=25,
            total_blocks=100,
        )
        self.iterations = [iteration(1), iteration(2)]
        self.open: set[FakeGeneration] = set()

    def is_healthy(self) -> bool:
        return self.healthy

    def is_silent(self, index: int) -> bool:
        return not self.healthy

    def end_all(self, reason: str) -> None:
        for one in list(self.open):
            one.end(reason)

    def drain_iterations(self) -> list[IterationStats]:
        drained, self.iterations = self.iterations, []
        return drained


class FakePipeline:
    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.client = FakeClient()
        self.tokenizer = tokenizer or make_tokenizer()
        self.renderer = ChatTemplate(self.tokenizer.chat_templates, {})
        self.asked: list[GenerateInput] = []
        self.chat_format = ChatFormat()
        self.aborted: list[str] = []
        self.num_open = 0
        self.max_open = 0
        self.is_held: Callable[[], bool] = lambda: False  # what was asked with HELD waits so long

    async def tokenize(self, given: GenerateInput) -> tuple[tuple[int, ...], str | None]:
        if given.token_ids is not None:
            return given.token_ids, None
        text = given.text
        if given.messages is not None:
            text = self.renderer.render(given.messages, given.chat, max_chars=100_000)
        assert text is not None
        check_length(text, MAX_SEQ_LEN)
        return tuple(self.tokenizer.encode(text, given.add_special_tokens)), text

    async def detokenize(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens)

    async def generate(
        self,
        given: GenerateInput,
        stream: bool = True,
        on_first_token: Callable[[], None] = lambda: None,
    ) -> "FakeGeneration":
        self.asked.append(given)
        ids, text = await self.tokenize(given)
        words = text or ""
        if "REFUSE" in words:
            raise CapacityError("256 requests are open, no more fit now", retry_after_s=3)
        if "BUG" in words:
            raise RuntimeError("secret detail of the server")
        if not ids:
            raise RequestError("invalid_value", "the prompt is empty", "prompt")
        if max(ids) >= INFO.vocab_size:
            raise RequestError("invalid_value", f"token id {max(ids)} is not in 0..256", "prompt")
        if len(ids) + (given.sampling.max_tokens or 1) > MAX_SEQ_LEN:
            raise RequestError(
                "context_length_exceeded",
                f"{len(ids)} + {given.sampling.max_tokens} tokens asked, at most {MAX_SEQ_LEN} fit",
                "max_tokens",
            )
        return FakeGeneration(self, given, text, ids, on_first_token)


class FakeGeneration:
    def __init__(
        self,
        pipeline: FakePipeline,
        given: GenerateInput,
        text: str | None,
        ids: tuple[int, ...],
        on_first_token: Callable[[], None],
    ) -> None:
        self.num_tokens = 0
        self._on_first_token = on_first_token
        self.prompt_ids = ids
        self.prompt_text = text
        self.num_samples = given.sampling.n
        self._pipeline = pipeline
        self._sampling = given.sampling
        self._pooling = given.pooling
        self._words = text or ""
        self._open = True
        self._pushing: asyncio.Task[None] | None = None
        pipeline.num_open += 1
        pipeline.max_open = max(pipeline.max_open, pipeline.num_open)
        pipeline.client.open.add(self)

    def end(self, reason: str) -> None:
        if self._pushing is not None:
            self._pushing.cancel()
            self._on_text(TextDelta(index=0, finish=FinishReason.ERROR, error=reason))

    def subscribe(self, prompt: int, on_text: OnText, on_bug: OnBug) -> None:
        self._on_text = partial(on_text, prompt)

        async def push() -> None:
            async for delta in self:
                on_text(prompt, delta)

        self._pushing = asyncio.create_task(push())

    async def aclose(self) -> None:
        self._pipeline.client.open.discard(self)
        if self._pushing is not None:
            self._pushing.cancel()
        if self._open:
            self._open = False
            self._pipeline.aborted.append(self._words)  # first: tests wait for the number
            self._pipeline.num_open -= 1

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        asked = self._sampling
        if self._pooling is not None:
            self._done()
            pooled = np.array([3.0, 4.0, 0.0, 0.0], np.float32).tobytes()
            yield TextDelta(index=0, finish=FinishReason.LENGTH, pooled=pooled)
            return
        answer = self._pipeline.tokenizer.encode(OUTPUT, add_special_tokens=False)
        if "SLOW" in self._words:
            answer = answer * 100
        num_tokens = min(asked.max_tokens or len(answer), len(answer))
        if asked.prompt_logprobs is not None:
            entries = tuple(self._logprob(i, asked.prompt_logprobs) for i in self.prompt_ids[1:])
            yield TextDelta(index=0, prompt_logprobs=entries)
        texts = [_Text() for _ in range(self.num_samples)]
        for position, token_id in enumerate(answer[:num_tokens]):
            await asyncio.sleep(0.05 if "SLOW" in self._words else 0)
            while "HELD" in self._words and position and self._pipeline.is_held():
                await asyncio.sleep(0.01)
            for sample in range(self.num_samples):
                if "FAIL" in self._words and position == 3:
                    self._done()
                    yield TextDelta(
                        index=sample, finish=FinishReason.ERROR, error="the engine failed"
                    )
                    return
                self.num_tokens += 1
                if position == 0:
                    self._on_first_token()
                yield TextDelta(
                    index=sample,
                    text=texts[sample].add(self._pipeline.tokenizer.token_bytes(token_id)),
                    token_ids=(token_id,),
                    num_tokens=1,
                    logprobs=()
                    if asked.logprobs is None
                    else (self._logprob(token_id, asked.logprobs),),
                    num_cached_tokens=1 if position == 0 else 0,
                )
        self._done()
        finish = FinishReason.LENGTH if num_tokens < len(answer) else FinishReason.STOP
        for sample in range(self.num_samples):
            yield TextDelta(
                index=sample,
                finish=finish,
                stop_reason=asked.stop[0] if asked.stop and finish == FinishReason.STOP else None,
            )

    def _done(self) -> None:
        self._open = False
        self._pipeline.num_open -= 1

    @staticmethod
    def _logprob(token_id: int, num_top: int) -> TokenLogprob:
        top = tuple((other, -0.25 * (other + 1)) for other in range(num_top))
        return TokenLogprob(token_id, -0.5, 3, top)


class _Text:
    """Holds bytes back until they are whole characters."""

    def __init__(self) -> None:
        self._held = b""

    def add(self, piece: bytes) -> str:
        self._held += piece
        try:
            text = self._held.decode()
        except UnicodeDecodeError:
            return ""
        self._held = b""
        return text


@contextmanager
def running_server(pipeline: FakePipeline, **settings: object) -> Iterator[SimpleNamespace]:
    """A real uvicorn on loopback, as `launch` configures it, in a thread."""
    listener = bind("127.0.0.1", 0)
    # Not as if on loopback, where tests would have to call it localhost.
    config = EngineConfig(**{"model": "org/model", "host": "0.0.0.0"} | settings)  # type: ignore[arg-type]
    drain = Drain()
    app = build_app(pipeline, config, drain=drain)  # type: ignore[arg-type]
    server = HttpServer(app, config.http_config, drain)
    server.end_requests = partial(pipeline.client.end_all, "the server is shutting down")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    port = listener.getsockname()[1]
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.005)
    try:
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{port}", port=port, pipeline=pipeline, server=server
        )
    finally:
        server.leave(at_once=True)
        thread.join(240)
