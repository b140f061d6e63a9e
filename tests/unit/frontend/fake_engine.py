"""An engine without a model, as a thread or as a process (`python -m fake_engine`).

Each turn it sends one `Deltas` message with the next delta of every open request, like a real one.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator

from penstock.ipc.channel import Receiver, Sender
from penstock.ipc.messages import (
    Abort,
    Deltas,
    EngineInfo,
    Fatal,
    Hello,
    Message,
    Ready,
    Stats,
    Submit,
    ToEngine,
)
from penstock.types.outputs import TokenDelta, TokenLogprob
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineCounters

Script = Callable[[Request], Iterable[TokenDelta]]


def make_info(**changes: object) -> EngineInfo:
    values = {
        "max_seq_len": 4096,
        "max_num_tokens": 2048,
        "max_batch_size": 1024,
        "max_queued": 2048,
        "chunked_prefill": True,
        "vocab_size": 512,
        "total_blocks": 100,
        "tokens_per_block": 16,
        "eos_token_ids": (),
        "device": "fake",
        "config": {},
        "choices": (),
        "memory": {},
        "rank_weight_bytes": (),
        "timeline": (),
    }
    return EngineInfo(**{**values, **changes})


def say(ids: Iterable[int], **first: object) -> Script:
    """A script: one delta per id, up to a stop id or max_tokens; for ever if ids are."""

    def script(request: Request) -> Iterator[TokenDelta]:
        for count, token_id in enumerate(ids, start=1):
            finish, stop_id = None, None
            if token_id in request.stop_ids:
                finish, stop_id = FinishReason.STOP, token_id
            elif count == request.max_tokens:
                finish = FinishReason.LENGTH
            entry = TokenLogprob(token_id, -0.5, 1)
            yield TokenDelta(
                request_id=request.id,
                token_ids=(token_id,),
                logprobs=() if request.sampling.logprobs is None else (entry,),
                finish=finish,
                stop_id=stop_id,
                **(first if count == 1 else {}),
            )
            if finish is not None:
                return
        yield TokenDelta(request_id=request.id, finish=FinishReason.LENGTH)

    return script


def echo(request: Request) -> Iterator[TokenDelta]:
    """The prompt, over and over."""
    ids = request.prompt_ids.tolist()
    return iter(say(ids[i % len(ids)] for i in range(request.max_tokens))(request))


class FakeEngine:
    def __init__(self, address: str, script: Script = echo, info: EngineInfo | None = None) -> None:
        self.script = script
        self.received: list[Message] = []
        self.going = threading.Event()  # cleared: messages are read, no delta is sent
        self.going.set()
        self._info = info or make_info()
        self._address = address
        self._open: dict[int, Iterator[TokenDelta]] = {}
        self._outbox: list[Message] = []
        self._client: Sender | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> "FakeEngine":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Silence: open requests get nothing more."""
        self._stop.set()
        self._thread.join()

    def send(self, message: Message) -> None:
        self._outbox.append(message)

    def submitted(self) -> list[Request]:
        return [one for m in self.received if isinstance(m, Submit) for one in m.requests]

    def aborted(self) -> set[int]:
        return {one for m in self.received if isinstance(m, Abort) for one in m.request_ids}

    def run(self) -> None:
        inbox = Receiver(self._address, ToEngine)
        while not self._stop.is_set():
            timeout_ms = 1 if self._open or self._outbox else 10
            while (message := inbox.receive(timeout_ms)) is not None:
                timeout_ms = 0
                self.received.append(message)
                self._handle(message)
            if self._client is None:
                continue
            while self._outbox:
                self._client.send(self._outbox.pop(0))
            if self.going.is_set() and self._open:
                self._turn(self._client)
        inbox.close()
        if self._client is not None:
            self._client.close()

    def _handle(self, message: Message) -> None:
        match message:
            case Hello(address=address):
                self._client = Sender(address)
                self._client.send(Ready(info=self._info))
            case Submit(requests=requests):
                self._open |= {one.id: iter(self.script(one)) for one in requests}
            case Abort(request_ids=ids):
                # Late on purpose: what was on its way, then the engine's own terminal delta.
                gone = [one for one in ids if self._open.pop(one, None) is not None]
                deltas = [TokenDelta(request_id=one, token_ids=(0,)) for one in gone]
                deltas += [TokenDelta(request_id=one, finish=FinishReason.ABORT) for one in gone]
                self._outbox.append(Deltas(deltas=tuple(deltas)))

    def _turn(self, client: Sender) -> None:
        deltas = []
        for request_id, answer in list(self._open.items()):
            delta = next(answer, None)
            if delta is None:
                del self._open[request_id]
                continue
            deltas.append(delta)
            if delta.finish is not None:
                del self._open[request_id]
        if deltas:
            client.send(Deltas(deltas=tuple(deltas)))
        client.send(Stats(counters=EngineCounters(running=len(self._open)), iterations=()))


def main() -> None:
    """As a child process: `load_format: dummy` cannot be built; token id 13 kills the engine."""
    from penstock.ipc.process import on_parent_exit, read_task

    task = read_task()
    on_parent_exit(lambda: os._exit(0))

    def script(request: Request) -> Iterable[TokenDelta]:
        if 13 in request.prompt_ids:
            os._exit(7)
        return echo(request)

    if task["config"]["load_format"] == "dummy":
        inbox = Receiver(task["address"], ToEngine)
        hello = inbox.receive(60_000)
        assert isinstance(hello, Hello)
        client = Sender(hello.address)
        client.send(Fatal(message="not enough memory for this model"))
        os._exit(1)
    FakeEngine(task["address"], script, make_info(max_queued=16, config=task["config"])).run()


if __name__ == "__main__":
    main()
