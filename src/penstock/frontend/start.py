"""Starts what a front end needs: engine process, client, tokenizer, chat template, pipeline.

`LLM` and the HTTP server both begin and end here.
"""

import asyncio
from pathlib import Path

from penstock.config.schema import EngineConfig
from penstock.frontend.client import EngineClient
from penstock.frontend.engine import EngineHandle
from penstock.frontend.pipeline import GenerationPipeline
from penstock.hub.folder import local_folder
from penstock.text.chat import ChatTemplate, read_chat_template
from penstock.text.tokenizer import Tokenizer


async def start_pipeline(config: EngineConfig) -> tuple[GenerationPipeline, EngineHandle]:
    """A pipeline whose engine is ready. Hand both to `stop_pipeline` in the end.

    The tokenizer is loaded while the engine starts; if either fails, nothing is left behind.
    """
    tokenizer_folder = await asyncio.to_thread(_tokenizer_folder, config)
    handle = EngineHandle()
    client = EngineClient(
        [handle.address], handle.socket_folder, max_stats_len=config.max_stats_len
    )
    try:
        handle.start(config.model_dump(mode="json"), lambda said: client.engine_died(0, said))
        (tokenizer, template), _ = await asyncio.gather(
            asyncio.to_thread(load_text_side, tokenizer_folder, config.chat_template),
            client.start(),
        )
    except BaseException:
        await _stop(client, handle)
        raise
    return GenerationPipeline(client, tokenizer, template, config.stream_interval), handle


async def stop_pipeline(pipeline: GenerationPipeline, handle: EngineHandle) -> None:
    """End open requests, then the engine process."""
    await _stop(pipeline.client, handle)


def load_text_side(
    folder: Path | None, chat_template: str | None
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Tokenizer and chat template of a folder; a given `chat_template` beats its own."""
    if folder is None:
        return None, None
    tokenizer = Tokenizer.from_folder(folder)
    templates = tokenizer.chat_templates
    if chat_template is not None:
        templates = {"default": read_chat_template(chat_template)}
    return tokenizer, ChatTemplate(templates, tokenizer.special_tokens) if templates else None


def _tokenizer_folder(config: EngineConfig) -> Path | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        return local_folder(config.model, config.revision, weights=False)
    given = Path(config.tokenizer).expanduser()
    return given if given.is_dir() else local_folder(config.tokenizer, weights=False)


async def _stop(client: EngineClient, handle: EngineHandle) -> None:
    await client.close()
    await asyncio.to_thread(handle.stop)
