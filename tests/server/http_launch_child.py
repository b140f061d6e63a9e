"""`serve` with an engine that is not there: python http_launch_child.py MODE PORT."""

import asyncio
import sys
import time

from http_fakes import FakePipeline

from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.server import launch


class FakeEngine:
    def __init__(self, lives_s: float) -> None:
        self._end = time.monotonic() + lives_s

    @property
    def is_alive(self) -> bool:
        return time.monotonic() < self._end


def main(mode: str, port: int) -> int:
    async def start_pipeline(config: EngineConfig) -> tuple[FakePipeline, FakeEngine]:
        if mode == "refuses":
            raise ConfigError("the checkpoint has no config.json")
        if mode == "breaks":
            raise RuntimeError("a mistake of ours")
        await asyncio.sleep(60 if mode == "loads" else 0.5)
        return FakePipeline(), FakeEngine(lives_s=1.0 if mode == "dies" else 1e9)

    async def stop_pipeline(pipeline: FakePipeline, engine: FakeEngine) -> None:
        print(f"engine stopped, aborted {pipeline.aborted}", file=sys.stderr, flush=True)

    launch.start_pipeline = start_pipeline  # type: ignore[assignment]
    launch.stop_pipeline = stop_pipeline  # type: ignore[assignment]
    launch._DRAIN_S = 1
    return launch.serve(EngineConfig(model="org/model", host="127.0.0.1", port=port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
