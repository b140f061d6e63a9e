"""Starts what stands before the engine: its process, client, tokenizer, chat template, pipeline.

`LLM` and the HTTP server both begin and end here.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.schema import EngineConfig
from penstock.frontend.capacity import Capacity
from penstock.frontend.client import EngineClient
from penstock.frontend.engine_handle import EngineHandle
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.pooling import check_judge
from penstock.frontend.rendering import (
    Renderer,
    TemplateProcess,
    TemplateTexts,
    start_renderer,
)
from penstock.frontend.tokenizer_folder import tokenizer_folder
from penstock.ipc.address import folder_of
from penstock.ipc.shared import Row
from penstock.text.chat import read_chat_template
from penstock.text.chat_format import ChatFormat, choose_chat_format
from penstock.text.harmony_prompt import HarmonyTemplate, is_gpt_oss
from penstock.text.tokenizer import Tokenizer
from penstock.types.pooling import Task


async def start_pipeline(config: EngineConfig) -> tuple[GenerationPipeline, EngineHandle]:
    """A pipeline with an engine of its own, ready. Hand both to `stop_pipeline` in the end."""
    folder = await asyncio.to_thread(tokenizer_folder, config)
    handle = EngineHandle.of(config)
    return await start_engine(config, folder, handle), handle


async def start_engine(
    config: EngineConfig,
    folder: Path | None,
    handle: EngineHandle,
    capacity: Capacity | None = None,
    routes: Row | None = None,
) -> GenerationPipeline:
    """The pipeline of the process that owns the engine, which may be on its way already; `folder`
    is the tokenizer's.

    The tokenizer is loaded while the engine starts; if either fails, nothing is left behind.
    """
    client = EngineClient(
        handle.addresses,
        handle.socket_folder,
        max_stats_len=config.max_stats_len,
        capacity=capacity,
        routes=routes,
    )
    try:
        if not handle.is_started:
            handle.start(config.model_dump(mode="json"))
        handle.watch(partial(client.engine_died, restarts=handle.restarts))
        return await _connect(client, config, folder)
    except BaseException:
        await _stop(client, handle)
        raise


async def join_engine(
    config: EngineConfig,
    folder: Path | None,
    engines: Sequence[str],
    client_id: int,
    capacity: Capacity,
    routes: Row | None = None,
) -> GenerationPipeline:
    """The pipeline of a further API server; the engines at these addresses are another's."""
    client = EngineClient(
        engines,
        folder_of(engines[0]),
        client_id=client_id,
        max_stats_len=config.max_stats_len,
        capacity=capacity,
        routes=routes,
    )
    try:
        return await _connect(client, config, folder)
    except BaseException:
        await client.close()
        raise


async def stop_pipeline(pipeline: GenerationPipeline, handle: EngineHandle) -> None:
    """End open requests, then the engine process."""
    await pipeline.aclose()
    await asyncio.to_thread(handle.stop)


async def _connect(
    client: EngineClient, config: EngineConfig, folder: Path | None
) -> GenerationPipeline:
    loading = asyncio.create_task(_load(folder, config))
    try:
        await asyncio.gather(loading, client.start())
    except BaseException:
        await _forget(loading)
        raise
    tokenizer, renderer, chat_format = loading.result()
    request_renderer = None
    if config.trust_request_chat_template and tokenizer is not None:
        # Its process is started by the first request that brings a template.
        request_renderer = TemplateProcess(TemplateTexts({}, tokenizer.special_tokens))
    return GenerationPipeline(
        client, tokenizer, renderer, config.stream_interval, chat_format, request_renderer
    )


async def _load(
    folder: Path | None, config: EngineConfig
) -> tuple[Tokenizer | None, Renderer | None, ChatFormat]:
    tokenizer, template, chat_format = await asyncio.to_thread(load_text_side, folder, config)
    return tokenizer, await start_renderer(template), chat_format


async def _forget(loading: "asyncio.Task[tuple[Any, Renderer | None, Any]]") -> None:
    """The engine does not start."""
    loading.cancel()
    await asyncio.wait((loading,))
    if not loading.cancelled() and loading.exception() is None:
        renderer = loading.result()[1]
        if renderer is not None:
            await renderer.aclose()


def load_text_side(
    folder: Path | None, config: EngineConfig
) -> tuple[Tokenizer | None, TemplateTexts | HarmonyTemplate | None, ChatFormat]:
    """Tokenizer and chat template of a folder, and how its outputs are parsed."""
    if folder is None:
        return None, None, ChatFormat()
    tokenizer = Tokenizer.from_folder(folder)
    if config.task == Task.SCORE:
        check_judge(tokenizer)
    templates = tokenizer.chat_templates
    if config.chat_template is not None:  # beats the model's own
        templates = {"default": read_chat_template(config.chat_template)}
    chat_format = choose_chat_format(
        tokenizer, templates.values(), config.reasoning_parser, config.tool_parser
    )
    return (
        tokenizer,
        _chat_template(tokenizer, templates, config.chat_template is None),
        chat_format,
    )


def _chat_template(
    tokenizer: Tokenizer, templates: Mapping[str, str], is_own: bool
) -> TemplateTexts | HarmonyTemplate | None:
    if is_own and any(map(is_gpt_oss, templates.values())):
        return HarmonyTemplate()
    return TemplateTexts(templates, tokenizer.special_tokens) if templates else None


async def _stop(client: EngineClient, handle: EngineHandle) -> None:
    await client.close()
    await asyncio.to_thread(handle.stop)
