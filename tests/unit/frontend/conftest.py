import asyncio
import shutil
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "text"))
import tiny_tokenizers
from fake_engine import FakeEngine, echo

from penstock.frontend.client import EngineClient
from penstock.frontend.pipeline import GenerationPipeline
from penstock.frontend.rendering import InProcess
from penstock.ipc.address import address, private_folder
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer

TEST_TIMEOUT_S = 240


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    backend = tiny_tokenizers.byte_level()
    return Tokenizer.from_folder(
        tiny_tokenizers.write_folder(folder, backend, chat_template=tiny_tokenizers.CHAT_TEMPLATE)
    )


@pytest.fixture
def run():
    """Run a coroutine to its end, within a time limit."""
    return lambda work: asyncio.run(asyncio.wait_for(work, TEST_TIMEOUT_S))


@asynccontextmanager
async def connect(script=echo, num_engines=1, info=None, **client_options):
    """A started client and its fake engines."""
    folder = private_folder()
    engines = [
        FakeEngine(address(folder, "engine"), script, info).start() for _ in range(num_engines)
    ]
    client = EngineClient([engine._address for engine in engines], folder, **client_options)
    try:
        await client.start()
        yield client, engines
    finally:
        await client.close()
        for engine in engines:
            engine.stop()
        shutil.rmtree(folder)


@pytest.fixture(name="connect")
def connect_fixture():
    return connect


@pytest.fixture
def serve(tokenizer):
    """An `async with` that gives a pipeline over one fake engine."""

    @asynccontextmanager
    async def serve(script=echo, with_tokenizer=True, stream_interval=1, **options):
        async with connect(script, **options) as (client, engines):
            template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
            renderer = InProcess(template)
            used = tokenizer if with_tokenizer else None
            yield GenerationPipeline(client, used, renderer, stream_interval), engines[0]

    return serve
