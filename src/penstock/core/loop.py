"""`EngineLoop`: admit, plan, run, commit. One loop; `depth` is how many steps may be in flight.

Depth 1 is synchronous; with depth 2 planning and committing happen while the device works. The
executor, the inbox, the outbox and the clock are handed in.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.core.followers import LateEntry
from penstock.core.scheduler import Scheduler
from penstock.ipc.messages import Abort, ClientLeft, Deltas, Message, Stats, Submit
from penstock.types.outputs import TokenDelta
from penstock.types.request import client_of
from penstock.types.stats import EngineCounters, IterationStats
from penstock.types.step import LateInputs, StepPlan, StepResult

_IDLE_WAIT_MS = 100
_GATE_WAIT_MS = 1
_STATS_PERIOD_S = 0.25
_MAX_ITERATIONS_KEPT = 1000


class StepHandle(Protocol):
    def wait(self) -> StepResult: ...


class Executor(Protocol):
    """Runs plans in order, each in two calls: what the commit before it knows comes second."""

    def forward(self, plan: StepPlan) -> None: ...

    def sample(self, step_id: int, late: LateInputs) -> StepHandle: ...


class Inbox(Protocol):
    def receive(self, timeout_ms: int) -> Message | None: ...


class Outbox(Protocol):
    def send(self, client_id: int, message: Message) -> None: ...

    def broadcast(self, message: Message) -> None: ...


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    started: float
    handle: StepHandle | None  # None until sample() was called


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        counters: EngineCounters,
        depth: int,
        clock: Callable[[], float],
        describe: Callable[[StepPlan, StepResult, float], IterationStats],
        late_inputs: Callable[[Sequence[LateEntry]], LateInputs] = lambda entries: LateInputs(),
        when_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`when_idle`: a bit of work that can wait, and whether there is more of it; a request that
        comes meanwhile waits for this bit."""
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._counters = counters
        self._depth = depth
        self._clock = clock
        self._describe = describe
        self._late_inputs = late_inputs
        self._when_idle = when_idle
        self._steps: deque[_Step] = deque()
        self._deltas: list[TokenDelta] = []  # not published yet, in order
        self._iterations: deque[IterationStats] = deque(maxlen=_MAX_ITERATIONS_KEPT)
        self._stats_due = clock()
        self._patience_ms = 0
        self._is_idle = False  # nothing was left to do, and what comes has been waited for
        self._stop = False

    def stop(self) -> None:
        """From any thread: leave `run` after the current step."""
        self._stop = True

    def run(self) -> None:
        while not self._stop:
            self.turn()

    def turn(self) -> None:
        """Launch one step if there is room for it, else commit the oldest in flight."""
        was_idle = not self._receive(self._patience_ms) and self._is_idle
        self._patience_ms, self._is_idle = 0, False
        plan = self._plan() if self._may_launch() else None
        if plan is not None:
            self._launch(plan)
        elif self._steps:
            self._commit()
        elif self._scheduler.has_work:  # nothing to do before a gate opens
            self._patience_ms = _GATE_WAIT_MS
        else:  # or before a message comes
            if self._iterations:
                self._stats_due = self._clock()  # or an ended request would be told as running
            self._is_idle = True
            has_more = was_idle and self._when_idle()
            self._patience_ms = 0 if has_more else _IDLE_WAIT_MS
        self._publish()
        self._report()

    def _receive(self, timeout_ms: int) -> bool:
        """Whether anything has come."""
        has_come = False
        while (message := self._inbox.receive(timeout_ms)) is not None:
            timeout_ms, has_come = 0, True
            match message:
                case Submit(requests=requests):
                    ended = [self._scheduler.add(request) for request in requests]
                case Abort(request_ids=ids):
                    ended = [self._scheduler.abort(request_id) for request_id in ids]
                case ClientLeft(client_id=client_id):
                    ended = self._scheduler.abort_client(client_id)
                case _:
                    raise AssertionError(f"{type(message).__name__} is not for the loop")
            self._deltas += [delta for delta in ended if delta is not None]
        return has_come

    def _plan(self) -> StepPlan | None:
        plan = self._scheduler.plan()
        self._deltas += self._scheduler.take_refused()
        return plan

    def _may_launch(self) -> bool:
        # A step that has not been sampled yet feeds nothing to the next one.
        return len(self._steps) < self._depth and all(step.handle for step in self._steps)

    def _launch(self, plan: StepPlan) -> None:
        step = _Step(plan, self._clock(), None)
        self._executor.forward(plan)
        self._steps.append(step)
        # Else when the steps before have committed (`_commit`): late inputs follow from them.
        if not plan.needs_late_inputs or len(self._steps) == 1:
            self._sample(step)
        in_flight = len(self._steps)
        self._counters.max_steps_in_flight = max(self._counters.max_steps_in_flight, in_flight)

    def _sample(self, step: _Step) -> None:
        late = LateInputs()
        if step.plan.needs_late_inputs:
            late = self._late_inputs(self._scheduler.late_entries())
        step.handle = self._executor.sample(step.plan.step_id, late)

    def _commit(self) -> None:
        step = self._steps.popleft()
        assert step.handle is not None
        result = step.handle.wait()
        self._deltas += self._scheduler.commit(result)
        if self._steps and self._steps[0].handle is None:
            self._sample_and_follow()
        self._iterations.append(self._describe(step.plan, result, step.started))

    def _sample_and_follow(self) -> None:
        """Sample the only step in flight, whose late inputs are known now, and launch the step
        after it at once: the device, which waits for both, would pause between them."""
        self._receive(0)
        plan = self._plan()
        self._sample(self._steps[0])
        if plan is not None:
            self._launch(plan)

    def _publish(self) -> None:
        by_client: dict[int, list[TokenDelta]] = {}
        for delta in self._deltas:
            by_client.setdefault(client_of(delta.request_id), []).append(delta)
        for client_id, mine in by_client.items():
            self._outbox.send(client_id, Deltas(deltas=tuple(mine)))
        self._deltas.clear()

    def _report(self) -> None:
        now = self._clock()
        if now < self._stats_due:
            return
        self._stats_due = now + _STATS_PERIOD_S
        stats = Stats(counters=replace(self._counters), iterations=tuple(self._iterations))
        self._outbox.broadcast(stats)
        self._iterations.clear()
