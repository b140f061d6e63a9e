"""Tasks of lm-eval, where it is installed, asked of an engine of our own or of a server.

lm-eval reads the data, words the questions and scores the answers; what it asks of a model is put
here as the requests of an `Asker`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from penstock.errors import ConfigError
from penstock.eval.likelihood import Weighed, shortened, total
from penstock.eval.published_run import MAX_WINDOW, Asker, Results
from penstock.eval.table import Score
from penstock.eval.task import Example
from penstock.text.tokenizer import Tokenizer

_MAX_TOKENS = 256  # as lm-eval's own models, where neither task nor user says


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalOptions:
    include_path: Path | None = None  # a folder with task files beside lm-eval's own
    num_fewshot: int | None = None
    limit: int | None = None
    max_tokens: int | None = None
    max_input_len: int | None = None
    apply_chat_template: bool = False
    system_prompt: str | None = None


def run_lm_eval(
    tasks: Sequence[str],
    options: LmEvalOptions,
    asker: Asker,
    load_tokenizer: Callable[[], Tokenizer],
) -> Results:
    path = options.include_path
    manager = TaskManager(include_path=None if path is None else str(path))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"lm-eval has no task '{unknown[0]}'; `lm-eval ls tasks` lists them")
    found = simple_evaluate(
        model=_Model(asker, options, load_tokenizer),
        tasks=list(tasks),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        system_instruction=options.system_prompt,
        apply_chat_template=options.apply_chat_template,
        task_manager=manager,
    )
    return Results(_scores(found), [one for some in found["samples"].values() for one in some])


class _Model(TemplateLM):
    """Answers written and endings weighed, all at once and always greedy."""

    tokenizer_name = "penstock"  # asked for where there is a chat template

    def __init__(
        self, asker: Asker, options: LmEvalOptions, load_tokenizer: Callable[[], Tokenizer]
    ) -> None:
        super().__init__()
        self._asker, self._options = asker, options
        self._load_tokenizer = load_tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        bos_id = self._tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        return self._tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Not yet text: the server or the engine applies the model's template to the messages."""
        if not add_generation_prompt:
            raise ConfigError("the task begins the answer itself, which a chat has no room for")
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        by_limit: dict[int, list[int]] = {}
        examples = []
        for i, (context, asked) in enumerate(request.args for request in requests):
            if asked.get("do_sample") and asked.get("temperature") != 0.0:
                raise ConfigError(
                    "the task draws its answers at random, here they are greedy; run lm_eval "
                    "--model local-completions with a server"
                )
            limit = self._options.max_tokens or asked.get("max_gen_toks") or _MAX_TOKENS
            by_limit.setdefault(int(limit), []).append(i)
            examples.append(self._example(context, asked.get("until") or ()))
        said = [""] * len(requests)
        for max_tokens, places in by_limit.items():
            responses = self._asker.ask([examples[i] for i in places], max_tokens)
            for i, response in zip(places, responses, strict=True):
                said[i] = response.content
        return said

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Of whole texts, in pieces that do not overlap."""
        max_len = (self._options.max_input_len or MAX_WINDOW) - 1
        sums = []
        for [text] in (request.args for request in requests):
            ids = self.tok_encode(text)
            pieces = get_rolling_token_windows(ids, self.prefix_token_id, max_len, 1)
            pairs = [make_disjoint_window(piece) for piece in pieces]
            asked = [Weighed((*before, *piece), len(before)) for before, piece in pairs]
            sums.append(sum(value for value, _ in self._weigh(asked)))
        return sums

    def _loglikelihood_tokens(
        self, requests: list[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        if self._options.apply_chat_template:
            raise ConfigError("endings are weighed after a text, not in a chat")
        max_len = self._options.max_input_len
        return self._weigh(
            [shortened(context + ending, len(context), max_len) for _, context, ending in requests]
        )

    def _weigh(self, asked: Sequence[Weighed]) -> list[tuple[float, bool]]:
        return [
            (total(chances), all(one.is_best for one in chances))
            for chances in self._asker.chances(asked)
        ]

    def _example(self, context: str, until: str | Sequence[str]) -> Example:
        stop = (until,) if isinstance(until, str) else tuple(until)
        if self._options.apply_chat_template:
            messages = tuple(json.loads(context))
            return Example(group="", messages=messages, stop=stop, expected="", rule="")
        return Example(group="", prompt=context, stop=stop, expected="", rule="")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Only what is weighed needs it."""
        return self._load_tokenizer()


def _scores(found: dict[str, Any]) -> list[Score]:
    """One for each metric and filter; those of a group of tasks come before its tasks'."""
    scores = []
    for task, values in found["results"].items():
        version = found["versions"].get(task, "")
        for key, value in sorted(values.items()):
            metric, comma, filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, float):
                continue
            stderr = values.get(f"{metric}_stderr,{filter}")
            scores.append(
                Score(
                    task=values.get("alias", task),
                    version=int(version) if isinstance(version, float) else version,
                    num_fewshot=found["n-shot"].get(task, 0),
                    metric=metric,
                    value=value,
                    stderr=stderr if isinstance(stderr, float) else None,
                    filter=filter,
                    more_is_better=found["higher_is_better"].get(task, {}).get(metric) is not False,
                )
            )
    return scores
