"""Prompts from files: ShareGPT, BurstGPT, sonnets, JSON lines, datasets of the hub.

What a file holds too little of is asked again, so that there are always `num_prompts`.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.bench.datasets.options import DatasetOptions
from penstock.bench.records import Ask
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

_SHAREGPT_REPOSITORY = "anon8231489123/ShareGPT_Vicuna_unfiltered"
_SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
# A conversation of the usual ShareGPT load: neither a fragment nor too long for most servers.
_MIN_TOKENS, _MAX_INPUT_TOKENS, _MAX_TOKENS = 4, 1024, 2048
_POEM_REQUEST = "Here are lines of poems. Write more of them in the same manner:\n"
_TEXT_COLUMNS = ("prompt", "question", "problem", "instruction", "text")
_DEFAULT_OUTPUT = 256
_T = TypeVar("_T")


def sharegpt(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """The first question of a conversation; as many tokens are asked for as its answer has."""
    if sharegpt_file(options) is None:
        raise ConfigError(
            "sharegpt needs a file of conversations: name it with --dataset-path, or a folder to "
            "fetch it into with --download-path; '--dataset-name random' makes prompts up"
        )
    found: list[Ask] = []
    for question, answer in read_turns(options, tokenizer):
        if len(found) == options.num_prompts:
            break
        num_input, num_output = len(question), options.sharegpt_output_len or len(answer)
        if min(num_input, num_output) < _MIN_TOKENS or num_input > _MAX_INPUT_TOKENS:
            continue
        if num_input + num_output <= _MAX_TOKENS:
            prompt = tuple(question) if options.tokenize_on_client else tokenizer.decode(question)
            found.append(Ask(prompt=prompt, num_input=num_input, max_tokens=num_output))
    return _as_many(found, options)


def burstgpt(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """Lengths of real requests (GPT-4's, those that were answered); the texts are runs of ids."""
    path = _needed(options, "burstgpt")
    with path.open(encoding="utf8", newline="") as file:
        rows = [
            (int(row["Request tokens"]), int(row["Response tokens"]))
            for row in csv.DictReader(file)
            if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0
        ]
    vocab = plain_ids(tokenizer)
    chosen = _shuffled(rows, options.seed)
    found = []
    for index, (num_input, num_output) in enumerate(chosen[: options.num_prompts]):
        ids = [vocab[(index + i) % len(vocab)] for i in range(num_input)]
        prompt = tuple(ids) if options.tokenize_on_client else tokenizer.decode(ids)
        found.append(Ask(prompt=prompt, num_input=num_input, max_tokens=num_output))
    return _as_many(found, options)


def sonnet(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """Lines of a poem file: the first ones are the same in all prompts, the others drawn."""
    lines = [line for line in _needed(options, "sonnet").read_text("utf8").splitlines() if line]
    per_line = sum(len(tokenizer.encode(line + "\n", False)) for line in lines) / len(lines)
    room = options.sonnet_input_len - len(tokenizer.encode(_POEM_REQUEST, False))
    num_lines = round(room / per_line)
    num_shared = min(num_lines, round(options.sonnet_prefix_len / per_line))
    if num_lines < 1:
        raise ConfigError(
            f"--sonnet-input-len {options.sonnet_input_len} leaves no room for a line"
        )
    drawn = random.Random(options.seed)
    asks = []
    for _ in range(options.num_prompts):
        poem = lines[:num_shared] + drawn.choices(lines, k=num_lines - num_shared)
        text = _POEM_REQUEST + "\n".join(poem)
        ids = tokenizer.encode(text, False)
        prompt = tuple(ids) if options.tokenize_on_client else text
        asks.append(Ask(prompt=prompt, num_input=len(ids), max_tokens=options.sonnet_output_len))
    return asks


def custom(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """JSON lines: see docs/benchmarks.md for the three shapes they may have."""
    path = _needed(options, "custom")
    with path.open(encoding="utf8") as file:
        asks = asks_of_lines(file, str(path), tokenizer, options.tokenize_on_client)
    return _as_many(asks, options)


def asks_of_lines(
    lines: Iterable[str], name: str, tokenizer: Tokenizer | None, as_ids: bool
) -> list[Ask]:
    """One request to a line. Without a tokenizer all must hold ids. `name` is for complaints."""
    asks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            asks.append(_ask_of_line(json.loads(line), tokenizer, as_ids))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{name}:{number} is no request: {error!r}") from None
    return asks


def hub_dataset(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """A dataset of the hub, or a local one in its formats, through the `datasets` package."""
    if options.dataset_path is None:
        raise ConfigError("hf needs the name of a dataset: --dataset-path ORG/NAME")
    try:
        import datasets
    except ImportError:
        raise ConfigError("--dataset-name hf needs the `datasets` package: install it") from None
    rows = datasets.load_dataset(
        options.dataset_path, options.hf_subset, split=options.hf_split or "train", streaming=True
    )
    found: list[Ask] = []
    for row in rows:
        if len(found) == options.num_prompts:
            break
        if (turns := question_and_answer(row)) is None:
            raise ConfigError(f"no question found in a row with {', '.join(row)}")
        question, answer = turns
        ids = tokenizer.encode(question, False)
        num_output = (
            options.hf_output_len or len(tokenizer.encode(answer, False)) or _DEFAULT_OUTPUT
        )
        prompt = tuple(ids) if options.tokenize_on_client else question
        found.append(Ask(prompt=prompt, num_input=len(ids), max_tokens=num_output))
    return _as_many(found, options)


def sharegpt_file(options: DatasetOptions) -> Path | None:
    """The file named, else the one fetched into the folder named; None where there is neither."""
    if options.dataset_path is not None:
        return _needed(options, "sharegpt")
    if options.download_path is None:
        return None
    from huggingface_hub import hf_hub_download

    try:
        return Path(
            hf_hub_download(
                _SHAREGPT_REPOSITORY,
                _SHAREGPT_FILE,
                repo_type="dataset",
                local_dir=options.download_path,
                etag_timeout=options.download_timeout,
            )
        )
    except OSError as error:
        raise ConfigError(
            f"cannot fetch {_SHAREGPT_FILE}: {error}; name a file with --dataset-path"
        ) from None


def read_turns(
    options: DatasetOptions, tokenizer: Tokenizer
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of first question and first answer, in an order that the seed decides."""
    path = sharegpt_file(options)
    assert path is not None
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    for row in _shuffled(conversations, options.seed):
        if (turns := question_and_answer(row)) is not None:
            yield tokenizer.encode(turns[0], False), tokenizer.encode(turns[1], False)


def question_and_answer(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Question and answer, of a conversation or of columns; the answer may be empty."""
    for name, key in (("conversations", "value"), ("messages", "content")):
        if name in row:
            turns = [turn[key] for turn in row[name] if turn.get("role") != "system"]
            return (turns[0], turns[1]) if len(turns) > 1 else None
    for name in _TEXT_COLUMNS:
        if isinstance(row.get(name), str):
            return row[name], str(row.get("answer") or row.get("output") or "")
    return None


def _ask_of_line(line: Mapping[str, Any], tokenizer: Tokenizer | None, as_ids: bool) -> Ask:
    if "input" in line:
        text, num_output = line["input"]["messages"][1]["content"], line["input"]["max_tokens"]
    else:
        text = line.get("prompt")
        num_output = line.get("output_tokens", _DEFAULT_OUTPUT)
    if text is None:
        ids = [int(one) for one in line["input_ids"]]
        return Ask(prompt=tuple(ids), num_input=len(ids), max_tokens=int(num_output))
    if tokenizer is None:
        raise ValueError("text, and there is no tokenizer")
    ids = tokenizer.encode(str(text), False)
    prompt = tuple(ids) if as_ids else str(text)
    return Ask(prompt=prompt, num_input=len(ids), max_tokens=int(num_output))


def plain_ids(tokenizer: Tokenizer) -> list[int]:
    """All that stand for text."""
    return [one for one in range(tokenizer.vocab_size) if one not in tokenizer.special_ids]


def _needed(options: DatasetOptions, name: str) -> Path:
    if options.dataset_path is None:
        raise ConfigError(f"{name} needs a file: name it with --dataset-path")
    path = Path(options.dataset_path).expanduser()
    if not path.is_file():
        raise ConfigError(f"--dataset-path '{path}': no such file")
    return path


def _shuffled(rows: Iterable[_T], seed: int) -> list[_T]:
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    return mixed


def _as_many(found: Sequence[Ask], options: DatasetOptions) -> list[Ask]:
    if not found:
        raise ConfigError("the dataset has no request that can be used")
    return [found[i % len(found)] for i in range(options.num_prompts)]
