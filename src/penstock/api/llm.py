"""`LLM`: the Python API. A thin shell over `GenerationPipeline`, which runs in a thread of its own.

Nothing is decided here: prompts become `GenerateInput`s, deltas become `RequestOutput`s.
"""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.api.collect import Collector
from penstock.config.schema import EngineConfig
from penstock.errors import RequestError
from penstock.frontend.engine_handle import EngineHandle
from penstock.frontend.generation import Generation
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.pooling import SAMPLING, check_dimensions, embedding, need_task
from penstock.frontend.start import start_pipeline
from penstock.text.tokenizer import Tokenizer
from penstock.types.adapter import Adapter
from penstock.types.lora_request import LoRARequest, adapter_of
from penstock.types.outputs import EmbeddingOutput, RequestOutput, TextDelta
from penstock.types.pooling import Pooling, Task
from penstock.types.request import ChatOptions, GenerateInput
from penstock.types.sampling import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]  # a mapping has "prompt" or "prompt_token_ids"
Message = Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None  # one for all prompts, or one for each
_T = TypeVar("_T")


class LLM:
    """A model and its engine process. Use it in a `with` block, or call `shutdown`.

    The keyword arguments are the fields of `EngineConfig`, the names of the YAML file.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **engine_config: Any) -> None:
        self.config = EngineConfig(model=model, tokenizer=tokenizer, **engine_config)
        self._loop = _LoopThread()
        try:
            self._pipeline, handle = self._loop.run(start_pipeline(self.config))
        except BaseException:
            self._loop.stop()
            raise
        self._shutdown = weakref.finalize(self, _shut_down, self._loop, self._pipeline, handle)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> RequestOutput | list[RequestOutput]:
        """One prompt in, one output out; a list of prompts in, a list out in the same order.

        `sampling_params` are taken as they are; without them the model's own defaults apply.
        """
        is_single = _is_single(prompts)
        asked = [prompts] if is_single else list(prompts)
        asks = self._inputs(asked, sampling_params, _text_or_ids, lora_request)
        outputs = self._run_all(asks, use_tqdm)
        return outputs[0] if is_single else outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_options: ChatOptions | Sequence[ChatOptions] = ChatOptions(),
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> RequestOutput | list[RequestOutput]:
        """One conversation in, one output out; a list of conversations in, a list out.

        Reasoning and tool calls are taken out of the text, as far as the model tags them.
        """
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_single else list(messages)
        options = _one_each(chat_options, len(conversations), "chat_options")
        asked = list(zip(conversations, options, strict=True))
        asks = self._inputs(asked, sampling_params, _conversation, lora_request)
        outputs = self._run_all(asks, use_tqdm)
        return outputs[0] if is_single else outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        dimensions: int | None = None,
        normalize: bool | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> EmbeddingOutput | list[EmbeddingOutput]:
        """The embedding of one prompt, or of each of a list; needs `task="embed"`.

        `dimensions`: the first so many numbers. `normalize`: None, as the model's folder says.
        """
        info = self._pipeline.client.info
        need_task(info, Task.EMBED)
        check_dimensions(dimensions, info)
        is_single = _is_single(prompts)
        each: list[Any] = [prompts] if is_single else list(prompts)
        asks = self._inputs(each, SAMPLING, _pooled_text_or_ids, lora_request)
        outputs = [
            EmbeddingOutput(
                embedding=embedding(one.outputs[0].pooled, info, dimensions, normalize),
                prompt_token_ids=one.prompt_token_ids,
                usage=replace(one.usage, completion_tokens=0),
            )
            for one in self._run_all(asks, use_tqdm)
        ]
        return outputs[0] if is_single else outputs

    encode = embed

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> "PendingOutput":
        """Start one prompt now; await, iterate or `.result()` what comes back."""
        [ask] = self._inputs([prompt], sampling_params, _text_or_ids, lora_request)
        return PendingOutput(self._loop, self._loop.submit(self._pipeline.generate(ask)))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with `skip_tokenizer_init`."""
        return self._pipeline.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without `sampling_params` uses: the model's own (`generation_config`)."""
        return SamplingParams(**self._pipeline.client.info.default_sampling)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """End open requests and the engine process. May be called twice."""
        self._shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _inputs(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        fields_of: Callable[[Any], dict[str, Any]],
        lora_request: Adapters = None,
    ) -> list[GenerateInput]:
        given = self.get_default_sampling_params() if params is None else params
        each = _one_each(given, len(prompts), "sampling_params")
        adapters = _one_each(lora_request, len(prompts), "lora_request")
        return [
            GenerateInput(sampling=one, adapter=self._adapter(asked), **fields_of(prompt))
            for prompt, one, asked in zip(prompts, each, adapters, strict=True)
        ]

    def _adapter(self, asked: LoRARequest | None) -> Adapter | None:
        if asked is None or asked.lora_path:
            return None if asked is None else asked.adapter
        named = {} if self.config.lora is None else self.config.lora.named
        if asked.lora_name not in named:
            raise RequestError(
                "invalid_value",
                f"lora_request names '{asked.lora_name}' and no lora_path; lora_config has "
                f"{', '.join(named) or 'no adapters'}",
                "lora_request",
            )
        return adapter_of(asked.lora_name, named[asked.lora_name])

    def _run_all(self, asks: Sequence[GenerateInput], use_tqdm: bool) -> list[RequestOutput]:
        with _progress(len(asks), use_tqdm) as advance:
            return self._loop.run(_run_all(self._pipeline, asks, advance))


class PendingOutput:
    """One running request. `result()` from a plain thread, `await` or `async for` from any loop."""

    def __init__(self, loop: "_LoopThread", started: "Future[Generation]") -> None:
        self._loop = loop
        self._started = started
        self._one_at_a_time = asyncio.Lock()
        self._collector: Collector | None = None
        self._output: RequestOutput | None = None

    def result(self, timeout: float | None = None) -> RequestOutput:
        return self._loop.submit(self._collect()).result(timeout)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return asyncio.wrap_future(self._loop.submit(self._collect())).__await__()

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """New text as it arrives; afterwards `result()` has the whole output."""
        while (delta := await asyncio.wrap_future(self._loop.submit(self._next()))) is not None:
            yield delta

    def abort(self) -> None:
        """End it now; its samples finish as "cancelled"."""
        self._loop.run(self._abort())

    async def _next(self) -> TextDelta | None:
        generation = await asyncio.wrap_future(self._started)
        async with self._one_at_a_time:
            if self._collector is None:
                self._collector = Collector(generation)
            delta = await anext(generation, None)
            if delta is not None:
                self._collector.add(delta)
            return delta

    async def _collect(self) -> RequestOutput:
        if self._output is None:
            while await self._next() is not None:
                pass
            assert self._collector is not None
            self._output = self._collector.output()
        return self._output

    async def _abort(self) -> None:
        (await asyncio.wrap_future(self._started)).abort()


async def _run_all(
    pipeline: GenerationPipeline, asks: Sequence[GenerateInput], advance: Callable[[], None]
) -> list[RequestOutput]:
    """All at once, as far as the engine's queue holds; the first error ends the rest."""
    if not asks:
        return []
    most_samples = max(ask.sampling.num_samples for ask in asks)
    room = asyncio.Semaphore(max(1, pipeline.client.info.max_queued // most_samples))

    async def run(ask: GenerateInput) -> RequestOutput:
        async with room, await pipeline.generate(ask, stream=False) as generation:
            collector = Collector(generation)
            async for delta in generation:
                collector.add(delta)
            advance()
            return collector.output()

    tasks = [asyncio.create_task(run(ask)) for ask in asks]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _LoopThread:
    """An event loop in a thread of its own, where the pipeline lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock", daemon=True)
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for it; an interrupt of the waiting thread cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel what still runs, let it clean up, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()


def _shut_down(loop: _LoopThread, pipeline: GenerationPipeline, handle: EngineHandle) -> None:
    if loop.is_current_thread:  # the garbage collector may run anywhere, here it must not wait
        threading.Thread(target=_shut_down, args=(loop, pipeline, handle)).start()
        return
    # At interpreter exit no new thread may start, so the blocking part runs in this one.
    loop.run(pipeline.aclose())
    handle.stop()
    loop.stop()


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _text_or_ids(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown or len(prompt) != 1:
            raise RequestError(
                "invalid_value",
                f"a prompt has one of 'prompt' and 'prompt_token_ids', not {sorted(prompt)}",
                "prompts",
            )
        [prompt] = prompt.values()
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}


def _pooled_text_or_ids(prompt: Prompt) -> dict[str, Any]:
    return _text_or_ids(prompt) | {"pooling": Pooling()}


def _conversation(asked: tuple[Sequence[Message], ChatOptions]) -> dict[str, Any]:
    messages, options = asked
    # The template writes the special tokens itself.
    fields = {"messages": tuple(messages), "chat": options, "add_special_tokens": False}
    return fields | {"parse_output": True}


def _one_each(given: _T | Sequence[_T], num: int, name: str) -> Sequence[_T]:
    """As many as there are prompts: one is for all of them."""
    each = given if isinstance(given, Sequence) else [given] * num
    if len(each) != num:
        raise RequestError(
            "invalid_value", f"{num} prompts but {len(each)} {name}; give one or as many", name
        )
    return each


@contextlib.contextmanager
def _progress(total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's stderr; nothing elsewhere."""
    console = Console(stderr=True)
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, disable=not (is_wanted and console.is_terminal)
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
