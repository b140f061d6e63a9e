"""`serve` with an engine that is not there: python http_launch_child.py MODE PORT.

Says on stdout what it was asked. Where the environment names a file in GATE, the engine is loaded,
and a request with HELD goes on, once there is one.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from http_fakes import FakeGeneration, FakePipeline

from penstock.config.http import HttpConfig
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend.engine_handle import EngineHandle
from penstock.server import launch, lifespan
from penstock.types.request import GenerateInput

GATE = os.environ.get("GATE")


class FakeEngine(EngineHandle):
    end = 1e18

    mode = ""

    def start(self, *_: object) -> None:
        if self.mode == "signalled":
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_alive(self) -> bool:
        return time.monotonic() < self.end


class TalkingPipeline(FakePipeline):
    async def generate(self, given: GenerateInput, *args: Any, **named: Any) -> FakeGeneration:
        generation = await super().generate(given, *args, **named)
        print("asked", flush=True)
        return generation


def is_closed() -> bool:
    return GATE is not None and not Path(GATE).exists()


def main(mode: str, port: int) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where whoever runs the tests does

    async def start_engine(
        config: EngineConfig, folder: None, engine: FakeEngine, *_: object
    ) -> FakePipeline:
        if mode == "refuses":
            raise ConfigError("the checkpoint has no config.json")
        if mode == "breaks":
            raise RuntimeError("a mistake of ours")
        while is_closed() or mode in ("loads", "signalled"):
            await asyncio.sleep(0.01)
        if mode == "dies":
            engine.end = time.monotonic() + 1.0
        pipeline = TalkingPipeline()
        pipeline.is_held = is_closed
        return pipeline

    async def stop_pipeline(pipeline: FakePipeline, engine: FakeEngine) -> None:
        engine.stop()
        print(f"engine stopped, aborted {pipeline.aborted}", file=sys.stderr, flush=True)

    FakeEngine.mode = mode
    launch.EngineHandle = FakeEngine  # type: ignore[misc]
    if mode != "misses":
        launch.tokenizer_folder = lambda config: None
    lifespan.start_engine = start_engine  # type: ignore[assignment]
    lifespan.stop_pipeline = stop_pipeline  # type: ignore[assignment]
    config = EngineConfig(
        model="/no/such/folder",
        host="127.0.0.1",
        port=port,
        http_config=HttpConfig(**json.loads(os.environ.get("HTTP_CONFIG", "{}"))),
        log_level="verbose" if mode == "serves-verbose" else None,
    )
    return launch.serve(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
