"""`serve` with an engine that is not there: python http_launch_child.py MODE PORT."""

import asyncio
import sys
import time

from http_fakes import FakePipeline

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.frontend.engine import EngineHandle
from penstock.server import launch


class FakeEngine(EngineHandle):
    end = 1e18

    @property
    def is_alive(self) -> bool:
        return time.monotonic() < self.end


def main(mode: str, port: int) -> int:
    async def start_engine(
        config: EngineConfig, folder: None, engine: FakeEngine, *_: object
    ) -> FakePipeline:
        if mode == "refuses":
            raise ConfigError("the checkpoint has no config.json")
        if mode == "breaks":
            raise RuntimeError("a mistake of ours")
        await asyncio.sleep(60 if mode == "loads" else 0.5)
        if mode == "dies":
            engine.end = time.monotonic() + 1.0
        return FakePipeline()

    async def stop_pipeline(pipeline: FakePipeline, engine: FakeEngine) -> None:
        engine.stop()
        print(f"engine stopped, aborted {pipeline.aborted}", file=sys.stderr, flush=True)

    launch.EngineHandle = FakeEngine  # type: ignore[misc]
    launch.tokenizer_folder = lambda config: None
    launch.start_engine = start_engine  # type: ignore[assignment]
    launch.stop_pipeline = stop_pipeline  # type: ignore[assignment]
    launch._DRAIN_S = 1
    return launch.serve(EngineConfig(model="org/model", host="127.0.0.1", port=port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
