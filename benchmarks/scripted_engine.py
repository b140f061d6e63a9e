"""An engine without a model: one token for every open request per step, at a set pace.

Started by `http_streams.py` in place of the engine process; speaks the same messages.
`model_kwargs` of the configuration says how: `tokens_per_s` (over all requests, 0: without a pause)
and `token_ids` (what every request is told, over and over). Streaming tests use it too.
"""

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from penstock.ipc.channel import Receiver, Sender
from penstock.ipc.messages import (
    Abort,
    ClientLeft,
    Deltas,
    EngineInfo,
    Hello,
    Message,
    Ready,
    Stats,
    Submit,
    ToEngine,
)
from penstock.ipc.process import on_parent_exit, read_task
from penstock.types.outputs import TokenDelta
from penstock.types.request import FinishReason, Request, client_of
from penstock.types.stats import EngineCounters, IterationStats

_STATS_PERIOD_S = 0.25
_MAX_ITERATIONS = 100  # of those between two reports


def describe(max_queued: int) -> EngineInfo:
    return EngineInfo(
        max_seq_len=1 << 20,
        max_num_tokens=8192,
        max_batch_size=65536,
        max_queued=max_queued,
        chunked_prefill=True,
        vocab_size=1 << 20,
        total_blocks=1,
        tokens_per_block=32,
        eos_token_ids=(),
        device="script",
        config={},
        choices=(),
        memory={},
        rank_weight_bytes=(),
        timeline=(),
    )


class ScriptedEngine:
    def __init__(self, address: str, settings: dict[str, Any], max_queued: int) -> None:
        self._inbox = Receiver(address, ToEngine)
        self._info = describe(max_queued)
        self._tokens_per_s = settings["tokens_per_s"]
        self._script = [(one,) for one in settings["token_ids"]]
        self._clients: dict[int, Sender] = {}
        self._left: dict[int, int] = {}  # tokens still to come, by request
        self._counters = EngineCounters()
        self._iterations: list[IterationStats] = []
        self._began = 0.0
        self._num_before = 0
        self._due = 0.0
        self._stats_due = 0.0

    def run(self) -> None:
        while True:
            wait_ms = 10 if not self._left else max(0, int((self._due - time.monotonic()) * 1e3))
            while (message := self._inbox.receive(wait_ms)) is not None:
                wait_ms = 0
                self._handle(message)
            if self._left and time.monotonic() >= self._due:
                self._step()
            if time.monotonic() >= self._stats_due:
                self._report()

    def _handle(self, message: Message) -> None:
        match message:
            case Hello(client_id=client_id, address=address):
                self._clients[client_id] = Sender(address)
                self._clients[client_id].send(Ready(info=self._info))
            case Submit(requests=requests):
                self._admit(requests)
            case Abort(request_ids=ids):
                self._abort(ids)
            case ClientLeft(client_id=client_id):
                if client_id in self._clients:
                    self._clients.pop(client_id).close()
                self._abort([one for one in self._left if client_of(one) == client_id])

    def _abort(self, ids: Iterable[int]) -> None:
        for one in ids:
            self._counters.aborted += self._left.pop(one, None) is not None

    def _report(self) -> None:
        self._stats_due = time.monotonic() + _STATS_PERIOD_S
        self._counters.running = len(self._left)
        for client in self._clients.values():
            client.send(Stats(counters=self._counters, iterations=tuple(self._iterations)))
        self._iterations.clear()

    def _admit(self, requests: tuple[Request, ...]) -> None:
        if not self._left:
            self._began = self._due = time.monotonic()
            self._num_before = self._counters.generated_tokens
        for one in requests:
            self._left[one.id] = one.max_tokens

    def _step(self) -> None:
        token = self._script[self._counters.steps % len(self._script)]
        self._counters.steps += 1
        self._counters.generated_tokens += len(self._left)
        if self._tokens_per_s:
            # Behind by more than a step: the pace is lost, not made up for.
            now = time.monotonic()
            self._due = max(self._due + len(self._left) / self._tokens_per_s, now - 0.05)
        if len(self._iterations) < _MAX_ITERATIONS:
            self._iterations.append(_iteration(self._counters.steps, len(self._left)))
        by_client: dict[int, list[TokenDelta]] = {}
        ended = []
        for one, left in self._left.items():
            self._left[one] = left - 1
            finish = None
            if left == 1:
                finish = FinishReason.LENGTH
                ended.append(one)
            delta = TokenDelta(request_id=one, token_ids=token, finish=finish)
            by_client.setdefault(client_of(one), []).append(delta)
        for client_id, deltas in by_client.items():
            self._clients[client_id].send(Deltas(deltas=tuple(deltas)))
        for one in ended:
            del self._left[one]
        if not self._left:
            seconds = time.monotonic() - self._began
            count = self._counters.generated_tokens - self._num_before
            print(f"scripted engine: {count} tokens in {seconds:.3f} s", file=sys.stderr)


def _iteration(number: int, num_active: int) -> IterationStats:
    numbers = (field.name for field in fields(IterationStats) if field.default is MISSING)
    zeros: dict[str, Any] = dict.fromkeys(numbers, 0)
    known = {"iter": number, "num_active": num_active, "num_generation": num_active}
    return IterationStats(**(zeros | known))


def main() -> None:
    task = read_task()
    on_parent_exit(lambda: os._exit(0))
    config = task["config"]
    ScriptedEngine(task["address"], config["model_kwargs"], config["max_queued_requests"]).run()


if __name__ == "__main__":
    main()
