"""Asks a published task's questions and scores what comes back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError
from penstock.eval.likelihood import Chance, Choices, Encode, Weighed, total, weighed, windows
from penstock.eval.published import Chosen, Continued, Published, Written, pick
from penstock.eval.table import Score, share
from penstock.eval.task import Example, Response, first_of_each_group

MAX_WINDOW = 1024  # tokens weighed at a time where --max_input_len is not given


class Asker(Protocol):
    """A model that answers and weighs: an engine of our own, or a server."""

    def ask(self, examples: Sequence[Example], max_tokens: int) -> list[Response]: ...

    def chances(self, asked: Sequence[Weighed]) -> list[list[Chance]]:
        """Of every id that is to be weighed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    data: Path  # file, or folder with files of the usual names
    shots: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    max_tokens: int | None = None
    max_input_len: int | None = None
    apply_chat_template: bool = False
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Results:
    scores: Sequence[Score]
    examples: Sequence[dict[str, Any]]  # each with what was asked, said and scored


Run = Callable[[Asker, Callable[[], Encode]], Results]
"""Asks a model. The second argument loads the tokenizer; only what is weighed needs it."""


def prepare(name: str, task: Published, options: RunOptions) -> Run:
    """Reads what will be asked: a file that is missing is told before a model is loaded."""
    for path in filter(None, (options.data, options.shots)):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder")
    data = pick(options.data, task.file_names)
    if data is None:
        raise ConfigError(f"{options.data} has none of {', '.join(task.file_names)}")
    if isinstance(task, Continued):
        text = task.read(data)
        return lambda asker, encode: _continued(name, task.version, text, options, asker, encode())
    num_fewshot = task.num_fewshot if options.num_fewshot is None else options.num_fewshot
    shots = options.shots or (pick(options.data, task.shot_names) if task.shot_names else None)
    if shots == data:  # a file was named, not a folder
        shots = pick(data.parent, task.shot_names)
    if isinstance(task, Written):
        examples = task.read(data, shots, num_fewshot)
        return lambda asker, encode: _written(name, task, examples, num_fewshot, options, asker)
    questions = task.read(data, shots, num_fewshot)
    return lambda asker, encode: _chosen(
        name, task, questions, num_fewshot, options, asker, encode()
    )


def _written(
    name: str,
    task: Written,
    examples: Sequence[Example],
    num_fewshot: int,
    options: RunOptions,
    asker: Asker,
) -> Results:
    asked = [_as_chat(example, options) for example in examples[: options.limit]]
    responses = asker.ask(asked, options.max_tokens or task.max_tokens)
    found = {
        filter: [_is_right(task, pick_out, *pair) for pair in zip(asked, responses, strict=True)]
        for filter, pick_out in task.filters.items()
    }
    scores = [
        share(name, task.version, num_fewshot, "exact_match", right, filter)
        for filter, right in found.items()
    ]
    shown = [
        {
            "asked": example.prompt or example.messages,
            "expected": example.expected,
            "said": response.content,
            **{filter: right[i] for filter, right in found.items()},
        }
        for i, (example, response) in enumerate(zip(asked, responses, strict=True))
    ]
    return Results(scores, shown)


def _as_chat(example: Example, options: RunOptions) -> Example:
    if example.prompt and options.apply_chat_template:
        message = {"role": "user", "content": example.prompt}
        example = replace(example, prompt="", messages=(message,))
    if options.system_prompt is not None and example.messages:
        system = {"role": "system", "content": options.system_prompt}
        example = replace(example, messages=(system, *example.messages))
    return replace(example, template_kwargs=options.template_kwargs)


def _is_right(
    task: Written, pick_out: Callable[[str], str | None], example: Example, response: Response
) -> bool:
    said = pick_out(response.content)
    return said is not None and task.is_equal(said, example.expected)


def _chosen(
    name: str,
    task: Chosen,
    questions: Sequence[Choices],
    num_fewshot: int,
    options: RunOptions,
    asker: Asker,
    encode: Encode,
) -> Results:
    if task.by_group:
        questions = first_of_each_group(questions, options.limit)
    else:
        questions = questions[: options.limit]
    asked = [
        weighed(encode, one.context, ending, options.max_input_len)
        for one in questions
        for ending in one.endings
    ]
    totals = iter([total(chances) for chances in asker.chances(asked)])
    shown: list[dict[str, Any]] = []
    for one in questions:
        sums = [next(totals) for _ in one.endings]
        lengths = [max(1, len(ending.strip())) for ending in one.endings]
        by_length = [value / length for value, length in zip(sums, lengths, strict=True)]
        record = {"group": one.group, "asked": one.context, "expected": one.expected}
        record |= {"logprobs": sums, "acc": _best(sums) == one.expected}
        if task.by_length:
            record["acc_norm"] = _best(by_length) == one.expected
        shown.append(record)
    metrics = ("acc", "acc_norm") if task.by_length else ("acc",)
    scores = [
        share(name, task.version, num_fewshot, metric, [one[metric] for one in shown])
        for metric in metrics
    ]
    if task.by_group:
        for group in dict.fromkeys(one.group for one in questions):
            right = [one["acc"] for one in shown if one["group"] == group]
            scores.append(share(f" - {group}", task.version, num_fewshot, "acc", right))
    return Results(scores, shown)


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def _continued(
    name: str, version: int, text: str, options: RunOptions, asker: Asker, encode: Encode
) -> Results:
    pieces = windows(encode(text), options.max_input_len or MAX_WINDOW)[: options.limit]
    sums = [total(chances) for chances in asker.chances(pieces)]
    num_tokens = sum(len(piece.ids) - piece.begin for piece in pieces)
    if num_tokens == 0:
        raise ConfigError("the text has less than two tokens")
    logprob = math.fsum(sums)
    scores = [_lower(name, version, "token_perplexity", math.exp(-logprob / num_tokens))]
    if options.limit is None:  # only of a whole text is it known how many bytes were weighed
        num_bytes, num_words = len(text.encode()), max(1, len(text.split()))
        scores += [
            _lower(name, version, "word_perplexity", math.exp(min(700.0, -logprob / num_words))),
            _lower(name, version, "byte_perplexity", math.exp(-logprob / num_bytes)),
            _lower(name, version, "bits_per_byte", -logprob / num_bytes / math.log(2)),
        ]
    shown = [
        {"num_tokens": len(piece.ids) - piece.begin, "logprob": value}
        for piece, value in zip(pieces, sums, strict=True)
    ]
    return Results(scores, shown)


def _lower(name: str, version: int, metric: str, value: float) -> Score:
    return Score(
        task=name, version=version, num_fewshot=0, metric=metric, value=value, more_is_better=False
    )
