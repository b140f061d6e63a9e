"""Starts what a front end needs: engine process, client, tokenizer, chat template, pipeline.

`LLM` and the HTTP server both begin and end here.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.config.schema import EngineConfig
from penstock.frontend.client import EngineClient
from penstock.frontend.engine import EngineHandle
from penstock.frontend.files import tokenizer_folder
from penstock.frontend.pipeline import GenerationPipeline
from penstock.ipc.address import folder_of
from penstock.text.chat import ChatTemplate, read_chat_template
from penstock.text.dialect import Dialect, choose_dialect
from penstock.text.harmony_prompt import HarmonyTemplate, is_gpt_oss
from penstock.text.tokenizer import Tokenizer


async def start_pipeline(config: EngineConfig) -> tuple[GenerationPipeline, EngineHandle]:
    """A pipeline with an engine of its own, ready. Hand both to `stop_pipeline` in the end."""
    folder = await asyncio.to_thread(tokenizer_folder, config)
    handle = EngineHandle()
    return await start_engine(config, folder, handle), handle


async def start_engine(
    config: EngineConfig,
    folder: Path | None,
    handle: EngineHandle,
    open_elsewhere: Callable[[], int] = lambda: 0,
    tell_open: Callable[[int], None] = lambda num_open: None,
) -> GenerationPipeline:
    """The pipeline of the front end that owns the engine, which may be on its way already; `folder`
    is the tokenizer's.

    The tokenizer is loaded while the engine starts; if either fails, nothing is left behind.
    """
    client = EngineClient(
        [handle.address],
        handle.socket_folder,
        max_stats_len=config.max_stats_len,
        open_elsewhere=open_elsewhere,
        tell_open=tell_open,
    )
    try:
        if not handle.is_started:
            handle.start(config.model_dump(mode="json"))
        handle.ended.add_done_callback(lambda ended: client.engine_died(0, ended.result()))
        return await _connect(client, config, folder)
    except BaseException:
        await _stop(client, handle)
        raise


async def join_engine(
    config: EngineConfig,
    folder: Path | None,
    engine: str,
    client_id: int,
    open_elsewhere: Callable[[], int],
    tell_open: Callable[[int], None],
) -> GenerationPipeline:
    """The pipeline of a further front end; the engine at the address `engine` is another's."""
    client = EngineClient(
        [engine],
        folder_of(engine),
        client_id=client_id,
        max_stats_len=config.max_stats_len,
        open_elsewhere=open_elsewhere,
        tell_open=tell_open,
    )
    try:
        return await _connect(client, config, folder)
    except BaseException:
        await client.close()
        raise


async def stop_pipeline(pipeline: GenerationPipeline, handle: EngineHandle) -> None:
    """End open requests, then the engine process."""
    await _stop(pipeline.client, handle)


async def _connect(
    client: EngineClient, config: EngineConfig, folder: Path | None
) -> GenerationPipeline:
    (tokenizer, template, dialect), _ = await asyncio.gather(
        asyncio.to_thread(load_text_side, folder, config), client.start()
    )
    return GenerationPipeline(client, tokenizer, template, config.stream_interval, dialect)


def load_text_side(
    folder: Path | None, config: EngineConfig
) -> tuple[Tokenizer | None, ChatTemplate | HarmonyTemplate | None, Dialect]:
    """Tokenizer and chat template of a folder, and how its answers are read."""
    if folder is None:
        return None, None, Dialect()
    tokenizer = Tokenizer.from_folder(folder)
    templates = tokenizer.chat_templates
    if config.chat_template is not None:  # beats the model's own
        templates = {"default": read_chat_template(config.chat_template)}
    dialect = choose_dialect(
        tokenizer, templates.values(), config.reasoning_parser, config.tool_parser
    )
    return tokenizer, _chat_template(tokenizer, templates, config.chat_template is None), dialect


def _chat_template(
    tokenizer: Tokenizer, templates: Mapping[str, str], is_own: bool
) -> ChatTemplate | HarmonyTemplate | None:
    if is_own and any(map(is_gpt_oss, templates.values())):
        return HarmonyTemplate()
    return ChatTemplate(templates, tokenizer.special_tokens) if templates else None


async def _stop(client: EngineClient, handle: EngineHandle) -> None:
    await client.close()
    await asyncio.to_thread(handle.stop)
