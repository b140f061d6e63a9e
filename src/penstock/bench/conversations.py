"""What conversations are made of: lengths of turns, and the words or token ids that fill them.

Sends nothing. Everything follows from a seed and the number of a conversation, so that one can be
made when its time has come, and again.
"""

import csv
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.bench.records import Response
from penstock.errors import ConfigError

_MIN_TOKENS = 4  # of what is drawn; less is a fragment
_COLUMNS = ("prompt_tokens", "output_tokens")
# Short common words, which most tokenizers have as one token with the space before them.
_NOUNS = "river house paper music garden table window water story city road light stone bread ship"
_VERBS = "make find take keep hold send read write build move turn open close follow answer ask"
_OTHERS = "red small old warm quick near every other two seven why how where after under with not"
_WORDS = f"{_NOUNS} {_VERBS} {_OTHERS}".split()


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of what the user says, and of the answer that is asked for."""

    num_user: int
    num_answer: int


class Lengths(Protocol):
    """Where the turns of a conversation come from: at least `low` of them, at most `high`."""

    def draw(self, drawn: random.Random, low: int, high: int) -> list[Turn]: ...


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Fits of 15,460 first turns of ShareGPT (4 to 1024 tokens in, 2048 in all; Qwen3's tokenizer).

    Cut to 4 .. 1024 tokens the user's have a mean of 214 (there: 220) and a 90th percentile of 650
    (605), the answers' a mean of 202 (203) and a 90th percentile of 491 (495).
    """

    user_median: float = 95.0
    user_sigma: float = 1.5
    answer_median: float = 120.0
    answer_sigma: float = 1.1

    def draw(self, drawn: random.Random, low: int, high: int) -> list[Turn]:
        return [self._turn(drawn) for _ in range(drawn.randint(low, high))]

    def _turn(self, drawn: random.Random) -> Turn:
        user = self.user_median * drawn.lognormvariate(0.0, self.user_sigma)
        answer = self.answer_median * drawn.lognormvariate(0.0, self.answer_sigma)
        return Turn(max(_MIN_TOKENS, round(user)), max(_MIN_TOKENS, round(answer)))


@dataclass(frozen=True, slots=True)
class FileLengths:
    """Turns of a file: each by itself, or in the conversations that the file groups them in."""

    conversations: Sequence[Sequence[Turn]]
    is_grouped: bool

    def draw(self, drawn: random.Random, low: int, high: int) -> list[Turn]:
        """A conversation of the file is cut to `high`, and may be shorter than `low`."""
        if self.is_grouped:
            return list(drawn.choice(self.conversations)[:high])
        return [drawn.choice(self.conversations)[0] for _ in range(drawn.randint(low, high))]


def read_lengths(path: Path) -> FileLengths:
    """CSV with a header, or JSON lines; `prompt_tokens` and `output_tokens` of a turn in each.

    Turns with the same `conversation` belong together, in the order of the file.
    """
    try:
        text = path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--lengths '{path}': {error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    is_json = bool(lines) and lines[0].lstrip().startswith("{")
    grouped: dict[str, list[Turn]] = {}
    alone: list[list[Turn]] = []
    rows: Iterable[Any] = lines if is_json else csv.DictReader(lines)
    for number, row in enumerate(rows, 1 if is_json else 2):
        try:
            fields: Mapping[str, Any] = json.loads(row) if is_json else row
            turn = Turn(*(int(fields[name]) for name in _COLUMNS))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number} has no {' and '.join(_COLUMNS)} ({error!r}); a line is one turn, "
                "of CSV with a header or of JSON"
            ) from None
        name = fields.get("conversation")
        if name is None:
            alone.append([turn])
        else:
            grouped.setdefault(str(name), []).append(turn)
    if grouped and alone:
        raise ConfigError(f"{path}: some turns have a conversation and some have none")
    if not (grouped or alone):
        raise ConfigError(f"{path} holds no turn")
    return FileLengths(list(grouped.values()) or alone, bool(grouped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All conversations of a benchmark."""

    seed: int = 0
    lengths: Lengths = LogNormalLengths()
    turns: tuple[int, int] = (1, 4)  # fewest and most
    system_tokens: int = 256  # shared by all conversations; 0: none
    max_user_tokens: int = 1024
    max_answer_tokens: int = 1024
    vocab_size: int = 10_000  # of ids that are made up

    def conversation(self, number: int) -> list[Turn]:
        """Lengths of one token at least and within the bounds; those beyond are cut."""
        drawn = random.Random(f"{self.seed}/{number}/lengths")
        return [
            Turn(
                max(1, min(turn.num_user, self.max_user_tokens)),
                max(1, min(turn.num_answer, self.max_answer_tokens)),
            )
            for turn in self.lengths.draw(drawn, *self.turns)
        ]


class History(Protocol):
    """A conversation so far. `ask` adds what the user says, `add_answer` what came back."""

    def ask(self, turn: Turn) -> dict[str, Any]:
        """The fields of the request that carry the whole conversation."""
        ...

    def add_answer(self, response: Response) -> None: ...


class ChatHistory:
    """Messages, for a server with a chat template. What a model reasoned goes back as said."""

    def __init__(self, workload: Workload, number: int | str) -> None:
        self._drawn = random.Random(f"{workload.seed}/{number}/text")
        self._messages: list[dict[str, str]] = []
        if workload.system_tokens:
            self._messages.append({"role": "system", "content": system_text(workload)})

    def ask(self, turn: Turn) -> dict[str, Any]:
        said = words(self._drawn, turn.num_user)
        self._messages.append({"role": "user", "content": said})
        return {"messages": self._messages, "max_completion_tokens": turn.num_answer}

    def add_answer(self, response: Response) -> None:
        self._messages.append({"role": "assistant", "content": response.text})


class TextHistory:
    """One growing text, for a server without a chat template."""

    def __init__(self, workload: Workload, number: int | str) -> None:
        self._drawn = random.Random(f"{workload.seed}/{number}/text")
        self._text = system_text(workload) + "\n" if workload.system_tokens else ""

    def ask(self, turn: Turn) -> dict[str, Any]:
        self._text += f"User: {words(self._drawn, turn.num_user)}\nAssistant:"
        return {"prompt": self._text, "max_tokens": turn.num_answer}

    def add_answer(self, response: Response) -> None:
        self._text += f"{response.text}\n"


class IdsHistory:
    """Token ids, exact in length, for models whose text is not read again as it was written.

    The answer's ids are the server's where it sends them. Where it does not, made-up ids of the
    same number stand for them: a prefix of later turns is then known only up to the first answer.
    """

    def __init__(self, workload: Workload, number: int | str) -> None:
        self._drawn = random.Random(f"{workload.seed}/{number}/text")
        self._vocab_size = workload.vocab_size
        system = random.Random(f"{workload.seed}/system")
        self._ids = self._made_up(system, workload.system_tokens)

    def ask(self, turn: Turn) -> dict[str, Any]:
        self._ids += self._made_up(self._drawn, turn.num_user)
        return {"prompt": self._ids, "max_tokens": turn.num_answer}

    def add_answer(self, response: Response) -> None:
        num = response.num_output or response.num_chunks
        self._ids += response.token_ids or self._made_up(self._drawn, num)

    def _made_up(self, drawn: random.Random, num: int) -> list[int]:
        """The first ids are left out: many vocabularies have special tokens there."""
        return [drawn.randrange(self._vocab_size // 8, self._vocab_size) for _ in range(num)]


def system_text(workload: Workload) -> str:
    return words(random.Random(f"{workload.seed}/system"), workload.system_tokens)


def words(drawn: random.Random, num: int) -> str:
    """About one token each."""
    return " ".join(drawn.choices(_WORDS, k=num))
