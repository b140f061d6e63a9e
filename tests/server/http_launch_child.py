"""`serve` with an engine that is not there: python http_launch_child.py MODE PORT."""

import asyncio
import json
import os
import signal
import sys
import time

from http_fakes import FakePipeline

from penstock.config.http import HttpConfig
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend.engine_handle import EngineHandle
from penstock.server import launch, lifespan


class FakeEngine(EngineHandle):
    end = 1e18

    mode = ""

    def start(self, *_: object) -> None:
        if self.mode == "signalled":
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_alive(self) -> bool:
        return time.monotonic() < self.end


def main(mode: str, port: int) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where whoever runs the tests does

    async def start_engine(
        config: EngineConfig, folder: None, engine: FakeEngine, *_: object
    ) -> FakePipeline:
        if mode == "refuses":
            raise ConfigError("the checkpoint has no config.json")
        if mode == "breaks":
            raise RuntimeError("a mistake of ours")
        await asyncio.sleep(60 if mode in ("loads", "signalled") else 0.5)
        if mode == "dies":
            engine.end = time.monotonic() + 1.0
        return FakePipeline()

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
