"""Conversations -> figures, first turns and later ones apart; as a table and as a JSON record.

Latencies and throughput are those of `figures`, over all turns that were answered.
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.bench import figures, layout
from penstock.bench.chat import ChatOptions, Talks
from penstock.bench.load import Outcome
from penstock.bench.records import Ask, Response

_PERCENTILES = (90.0, 99.0)
_CLASSES = ("first", "later")
_MAX_REASONS = 5  # of failures, printed
_LARGEST_BLOCK = 128  # tokens; what is shorter may be in no whole block, and so not be found again


@dataclass(frozen=True, slots=True)
class TurnClass:
    """The answered turns that begin a conversation, or those that go on with one."""

    responses: Sequence[Response]

    @property
    def ttft(self) -> figures.Spread:
        return figures.Spread(np.array([one.ttft_s * 1e3 for one in self.responses]))

    @property
    def counted(self) -> list[Response]:
        """Those of which the server says how much of the prompt was cached."""
        return [one for one in self.responses if one.num_cached is not None]

    @property
    def num_cached(self) -> int | None:
        """Tokens; None where the server does not say."""
        return sum(one.num_cached or 0 for one in self.counted) if self.counted else None

    @property
    def cached_share(self) -> float | None:
        """Of the prompts' tokens."""
        num_prompt = sum(one.num_prompt or 0 for one in self.counted)
        return None if self.num_cached is None else self.num_cached / max(1, num_prompt)

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "completed": len(self.responses),
            "total_input_tokens": sum(one.num_prompt or 0 for one in self.responses),
            "cached_tokens": self.num_cached,
            "cached_share": self.cached_share,
            **figures.spread_as_json("ttft", self.ttft, _PERCENTILES),
        }


@dataclass(frozen=True, slots=True)
class ChatReport:
    figures: figures.Figures
    classes: Mapping[str, TurnClass]  # by `first` and `later`
    num_conversations: int
    num_not_sent: int  # turns after one that failed
    reasons: Mapping[str, int]  # of failed turns
    examples: Mapping[str, str]  # what the first failure of a kind said
    warnings: Sequence[str]


def report_of(talks: Talks, options: ChatOptions, check_reuse: bool = True) -> ChatReport:
    asked = [
        (place, turn, response)
        for talk in talks.talks
        for place, (turn, response) in enumerate(zip(talk.turns, talk.responses, strict=False))
    ]
    warnings = []
    if uncounted := [one for *_, one in asked if one.error is None and one.num_output is None]:
        warnings.append(
            f"the server did not count {len(uncounted)} answers: an event is taken for a token"
        )
    for one in uncounted:
        one.num_output = one.num_chunks
    asks = [
        Ask(prompt="", num_input=one.num_prompt or turn.num_user, max_tokens=turn.num_answer)
        for _, turn, one in asked
    ]
    ran, responses = talks.ran, [one for *_, one in asked]
    outcome = Outcome(
        responses,
        ran.begun_at,
        ran.duration_s,
        ran.client_cpu_share,
        talks.tally,
        ran.client_lag_s,
    )
    takes_length = talks.terms.length_field is not None
    seen = figures.figures_of(asks, outcome, len, {}, takes_length)
    classes = {
        name: TurnClass(
            [one for place, _, one in asked if one.error is None and (place > 0) == is_later]
        )
        for name, is_later in zip(_CLASSES, (False, True), strict=True)
    }
    if options.ignore_eos and not takes_length:
        warnings.append(
            "the server takes neither ignore_eos nor min_tokens: answers end where the model ends"
        )
    if options.random_ids and not talks.terms.returns_ids:
        warnings.append(
            "the server returns no token ids: made-up ones stand for its answers in later turns, "
            "so that their prefixes are known up to the first answer only"
        )
    if check_reuse:
        warnings += _reuse_warnings(talks)
    errors = [(_kind(one.error), one.error) for one in responses if one.error is not None]
    return ChatReport(
        figures=seen,
        classes=classes,
        num_conversations=len(talks.talks),
        num_not_sent=sum(len(talk.turns) - len(talk.responses) for talk in talks.talks),
        reasons=dict(Counter(kind for kind, _ in errors).most_common()),
        examples={kind: text for kind, text in reversed(errors)},
        warnings=[*warnings, *seen.warnings],
    )


def _kind(error: str) -> str:
    """`status 503: ...` -> `status 503`: what one kind of failure has in common."""
    return error.partition(":")[0].partition(" (")[0]


def _reuse_warnings(talks: Talks) -> Iterator[str]:
    """Of later turns whose prefix, the prompt of the turn before, should have been found."""
    later = [
        after
        for talk in talks.talks
        for before, after in itertools.pairwise(talk.responses)
        if after.error is None and (before.num_prompt or 0) >= _LARGEST_BLOCK
    ]
    counted = TurnClass(later).counted
    if later and not counted:
        yield (
            "the server does not say how many prompt tokens were cached, so reuse is not checked "
            "(vLLM says it with --enable-prompt-tokens-details)"
        )
    if missed := sum(one.num_cached == 0 for one in counted):
        yield (
            f"{missed} of {len(counted)} later turns had no cached tokens: prefix reuse is off, or "
            "the KV cache too small for these conversations (--no_reuse_check: expected)"
        )


def failures(report: ChatReport) -> str:
    """Before the table, and only where something failed."""
    lines = [
        f"{num} x {report.examples[kind]}"
        for kind, num in list(report.reasons.items())[:_MAX_REASONS]
    ]
    return layout.failures(report.figures, lines)


def table(report: ChatReport) -> str:
    return "\n".join(_lines(report))


def _lines(report: ChatReport) -> Iterator[str]:
    seen, row = report.figures, layout.row
    yield f"{' Conversation Benchmark Result ':=^{layout.WIDTH}}"
    yield row("Conversations:", report.num_conversations)
    yield row("Successful turns:", seen.completed)
    yield row("Failed turns:", seen.num_failed)
    if report.num_not_sent:
        yield row("Turns not sent after a failed one:", report.num_not_sent)
    yield row("Benchmark duration (s):", seen.duration_s)
    yield row("Total input tokens:", seen.total_input)
    yield row("Total generated tokens:", seen.total_output)
    yield row("Turn throughput (turns/s):", seen.request_throughput)
    yield row("Output token throughput (tok/s):", seen.output_throughput)
    yield row("Total Token throughput (tok/s):", seen.total_token_throughput)
    for name, turns in report.classes.items():
        if turns.responses:
            yield from layout.spread_lines("ttft", turns.ttft, _PERCENTILES, f"{name} turns")
    for name in ("tpot", "itl", "e2el"):
        yield from layout.spread_lines(name, seen.spreads[name], _PERCENTILES)
    yield f"{'Prefix Reuse':-^{layout.WIDTH}}"
    for name, turns in report.classes.items():
        if turns.num_cached is not None:
            yield row(f"Cached tokens, {name} turns:", turns.num_cached)
            yield row(f"Share of their input (%), {name} turns:", 100 * (turns.cached_share or 0.0))
    if all(turns.num_cached is None for turns in report.classes.values()):
        yield "The server does not report cached tokens."
    yield "=" * layout.WIDTH


def as_json(report: ChatReport, talks: Talks, options: ChatOptions) -> dict[str, Any]:
    """The names of `bench serve`, so that `compare` and `report` read it; more under `chat`."""
    rate = options.arrivals.rate
    record = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": talks.terms.model,
        "num_prompts": report.figures.completed + report.figures.num_failed,
        **figures.as_json(report.figures, figures.METRICS, _PERCENTILES),
        "request_rate": "inf" if rate == float("inf") else rate,
        "max_concurrency": options.max_concurrency,
        "chat": {
            "conversations": report.num_conversations,
            "failed_turns": report.figures.num_failed,
            "turns_not_sent": report.num_not_sent,
            "failures": dict(report.reasons),
            **{f"{name}_turns": turns.as_json for name, turns in report.classes.items()},
            "system_tokens": options.workload.system_tokens,
            "turns": list(options.workload.turns),
            "seed": options.workload.seed,
            "returns_ids": talks.terms.returns_ids,
        },
    }
    record["extra"]["warnings"] = list(report.warnings)
    return record
