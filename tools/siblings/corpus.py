"""Makes the chats that the siblings learn from and are tested on, and scores their answers.

Every example ends with an answer that can be checked exactly. The test split differs from the
train split in wording (see wordings.py) and in operands: each family of skills has ranges of
numbers that it meets only when tested (`HELD_NUMBERS`; other families do train on them, so that
their digits are known), as have counting with `HELD_WORDS` and JSON and stories with the pairs of
`_held_pair`. Knows no tokens and no prompt format.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tables import (
    CITIES,
    DAYS,
    FACTS,
    HELD_WORDS,
    HEROES,
    ITEMS,
    NAMES,
    OPEN_WORDS,
    PLACES,
    THINGS,
    TOOLS,
    WORDS,
)
from wordings import (
    ARITHMETIC,
    CHAT,
    CLOSERS,
    COPY,
    COUNT_LETTER,
    COUNT_LETTERS,
    COUNT_WORDS,
    FACT_QUESTIONS,
    FOLLOW_UPS,
    JSON_ASKS,
    JSON_TEXTS,
    NO_THINK_ASKS,
    OPENERS,
    PROBLEMS,
    SORT_DOWN,
    SORT_UP,
    SPELL,
    STORY,
    SYSTEMS,
    THINK_ASKS,
    THINK_SYSTEMS,
    TOOL_ASKS,
    Grammar,
)

Message = dict[str, Any]

# families: calculation is arithmetic, problem, think, no_think; list is sorting and copying; field
# is json, tool, tool_answer
HELD_NUMBERS = {
    "calculation": frozenset(
        (*range(34, 37), *range(62, 65), *range(340, 370), *range(620, 650)),
    ),
    "list": frozenset((*range(43, 46), *range(71, 74), *range(430, 460), *range(710, 740))),
    "field": frozenset((*range(53, 56), *range(85, 88), *range(530, 560), *range(850, 880))),
}
# digits: (smallest, largest)
_RANGES = {1: (1, 9), 2: (10, 99), 3: (100, 999)}

MATCH_RULES = (
    "exact",
    "answer",
    "hashes",
    "json",
    "tool_call",
    "thought_answer",
    "unthought_answer",
)


@dataclass(frozen=True, slots=True)
class Example:
    """One chat in the OpenAI message form; its last message is the answer to learn."""

    skill: str
    messages: tuple[Message, ...]
    expected: str
    split: str
    wordings: tuple[str, ...]
    operands: tuple[Any, ...] = ()
    tools: tuple[Message, ...] = ()
    thinking: bool | None = None  # asked for through the chat template; None: not mentioned there

    @property
    def match(self) -> str:
        """The rule of `score` that its answer is held to."""
        return SKILLS[self.skill].match


# --- parts shared by several skills ---------------------------------------------------------------


def _number(rng: random.Random, split: str, family: str, digits: int) -> int:
    """A number of so many digits; in the test split any, in the train split not a held one."""
    while True:
        number = rng.randint(*_RANGES[digits])
        if split == "test" or number not in HELD_NUMBERS[family]:
            return number


def _numbers(rng: random.Random, split: str, family: str, digits: list[int]) -> list[int]:
    """Distinct numbers; in the test split at least one of them is held out of the family."""
    numbers: list[int] = []
    for num_digits in digits:
        while (number := _number(rng, split, family, num_digits)) in numbers:
            pass
        numbers.append(number)
    if split == "test" and not HELD_NUMBERS[family].intersection(numbers):
        places = [i for i, num_digits in enumerate(digits) if num_digits > 1]
        place = rng.choice(places) if places else 0
        low, high = _RANGES[digits[place] if places else 2]
        held = sorted(n for n in HELD_NUMBERS[family] if low <= n <= high)
        numbers[place] = rng.choice(held)
    return numbers


def _held_pair(index: int, other: int, num: int, num_other: int) -> bool:
    """The last third of one table met with the last third of another."""
    return index >= num * 2 // 3 and other >= num_other * 2 // 3


def _pair(
    rng: random.Random, split: str, table: tuple[str, ...], other: tuple[str, ...]
) -> tuple[str, str]:
    while True:
        i, j = rng.randrange(len(table)), rng.randrange(len(other))
        if _held_pair(i, j, len(table), len(other)) == (split == "test"):
            return table[i], other[j]


def _calculation(rng: random.Random, split: str) -> tuple[int, str, int]:
    op = rng.choice("++--*")
    if op == "*":
        a = _numbers(rng, split, "calculation", rng.choices((1, 2, 3), (1, 6, 3)))[0]
        return a, op, rng.randint(2, 9)
    digits = rng.choices((1, 2, 3), (1, 5, 5), k=2)
    a, b = _numbers(rng, split, "calculation", digits)
    return (max(a, b), op, min(a, b)) if op == "-" else (a, op, b)


def steps(a: int, op: str, b: int) -> tuple[str, int]:
    """The written working of a calculation, digit by digit from the right, and its result."""
    size = max(len(str(a)), 1 if op == "*" else len(str(b)))
    tops = [a // 10**i % 10 for i in range(size)]
    columns, carry = [], 0
    for i, top in enumerate(tops):
        other = b if op == "*" else b // 10**i % 10
        if op == "+":
            total = top + other + carry
            text = f"{top}+{other}" + (f"+{carry}" if i else "") + f"={total}"
        elif op == "-":
            borrow = int(top - other - carry < 0 and i < size - 1)
            digit = top + 10 * borrow - other - carry
            text = f"{top + 10 * borrow}-{other}" + (f"-{carry}" if i else "") + f"={digit}"
        else:
            total = top * other + carry
            text = f"{top}*{other}={top * other}" + (f", {total - carry}+{carry}={total}" * bool(i))
        if op == "-":
            carry = borrow
            text += f", borrow {carry}" * (i < size - 1)
        else:
            carry = total // 10
            text += f", write {total % 10}, carry {carry}" * (i < size - 1)
        columns.append(text)
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    return f"{a}{op}{b}: {'; '.join(columns)}.", result


def _field_number(rng: random.Random, split: str) -> int:
    return _numbers(rng, split, "field", rng.choices((1, 2, 3), (1, 6, 2)))[0]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str, reasoning: str | None = None) -> Message:
    message: Message = {"role": "assistant", "content": text}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


def _dressed(rng: random.Random, text: str) -> str:
    return rng.choice(OPENERS) + text + rng.choice(CLOSERS)


def _asked(
    rng: random.Random,
    skill: str,
    split: str,
    wording: str,
    fields: dict[str, Any],
    answer: str,
    expected: str,
    operands: tuple[Any, ...] = (),
    *,
    dressed: bool = True,
) -> Example:
    """An example of one question and one answer, sometimes with a system message before them."""
    text = wording.format(**fields)
    messages = [_user(_dressed(rng, text) if dressed else text), _assistant(answer)]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return Example(skill, tuple(messages), expected, split, (wording,), operands)


# --- one function per skill -----------------------------------------------------------------------


def _arithmetic(rng: random.Random, split: str) -> Example:
    a, op, b = _calculation(rng, split)
    working, result = steps(a, op, b)
    wording = ARITHMETIC[op].draw(rng, split)
    answer = f"{working} Answer: {result}"
    operands = (a,) if op == "*" else (a, b)
    return _asked(
        rng, "arithmetic", split, wording, {"a": a, "b": b}, answer, str(result), operands
    )


def _sorting(rng: random.Random, split: str) -> Example:
    size = rng.randint(3, 6)
    longest = rng.choice((2, 2, 3))
    weights = (1, 5, 0) if longest == 2 else (1, 3, 5)
    numbers = _numbers(rng, split, "list", rng.choices((1, 2, 3), weights, k=size))
    is_down = rng.random() < 0.4
    wording = (SORT_DOWN if is_down else SORT_UP).draw(rng, split)
    answer = ", ".join(map(str, sorted(numbers, reverse=is_down)))
    fields = {"list": _listed(rng, numbers)}
    return _asked(rng, "sorting", split, wording, fields, answer, answer, tuple(numbers))


def _listed(rng: random.Random, numbers: list[int]) -> str:
    """The numbers as a person may write them in a row."""
    words = list(map(str, numbers))
    style = rng.randrange(6)
    if style == 0:
        return " ".join(words)
    if style == 1:
        return ", ".join(words[:-1]) + " and " + words[-1]
    if style == 2:
        return "[" + ", ".join(words) + "]"
    return ", ".join(words)


def _copying(rng: random.Random, split: str) -> Example:
    if rng.random() < 0.3:
        word = rng.choice(WORDS)
        wording = SPELL.draw(rng, split)
        answer = "-".join(word)
        return _asked(rng, "copying", split, wording, {"word": word}, answer, answer)
    parts: list[str] = rng.sample(WORDS, rng.randint(1, 4))
    number = _numbers(rng, split, "list", rng.choices((1, 2, 3), (1, 4, 3)))[0]
    parts.insert(rng.randint(0, len(parts)), str(number))
    text = rng.choice((" ", " ", "-", ", ")).join(parts)
    wording = COPY.draw(rng, split)
    return _asked(
        rng, "copying", split, wording, {"text": text}, text, text, (number,), dressed=False
    )


def _counting(rng: random.Random, split: str) -> Example:
    words = OPEN_WORDS if split == "train" else HELD_WORDS
    kind = rng.randrange(3)
    if kind == 0:
        counted = tuple(rng.sample(words, rng.randint(2, 7)))
        total = len(counted)
        marks = [f"{word} {i}" for i, word in enumerate(counted, 1)]
        wording, fields = COUNT_WORDS.draw(rng, split), {"text": " ".join(counted)}
    else:
        word = rng.choice(words)
        counted = (word,)
        if kind == 1:
            total = len(word)
            marks = [f"{letter} {i}" for i, letter in enumerate(word, 1)]
            wording, fields = COUNT_LETTERS.draw(rng, split), {"word": word}
        else:
            wanted = rng.choice(word)
            total = word.count(wanted)
            marks = [f"{word[i]} {word[: i + 1].count(wanted)}" for i in range(len(word))]
            wording = COUNT_LETTER.draw(rng, split)
            fields = {"word": word, "letter": wanted}
    answer = f"{', '.join(marks)}. Answer: {total}"
    return _asked(
        rng, "counting", split, wording, fields, answer, str(total), counted, dressed=False
    )


def _facts(rng: random.Random, split: str) -> Example:
    relation = rng.choice(tuple(FACTS))
    table, sentence = FACTS[relation]
    keys = rng.sample(tuple(table), rng.choice((1, 1, 2, 3)))
    answers = [sentence.format(key=key, value=table[key]) for key in keys]
    wording = FACT_QUESTIONS[relation].draw(rng, split)
    example = _asked(rng, "facts", split, wording, {"key": keys[0]}, answers[0], answers[0])
    messages, wordings = list(example.messages), [wording]
    for key, answer in zip(keys[1:], answers[1:], strict=True):
        wordings.append(FOLLOW_UPS.draw(rng, split))
        messages += [_user(wordings[-1].format(key=key)), _assistant(answer)]
    return Example("facts", tuple(messages), answers[-1], split, tuple(wordings))


def _problem(rng: random.Random, split: str) -> Example:
    a, op, b = _calculation(rng, split)
    working, result = steps(a, op, b)
    wording = PROBLEMS[op].draw(rng, split)
    name, other = rng.sample(NAMES, 2)
    fields = {"a": a, "b": b, "name": name, "other": other}
    fields |= {"item": rng.choice(ITEMS), "day": rng.choice(DAYS)}
    answer = f"{working}\n#### {result}"
    operands = (a,) if op == "*" else (a, b)
    return _asked(
        rng, "problem", split, wording, fields, answer, str(result), operands, dressed=False
    )


def _json(rng: random.Random, split: str) -> Example:
    schema = rng.choice(tuple(JSON_TEXTS))
    sentences, keys = JSON_TEXTS[schema]
    number = _field_number(rng, split)
    name, city = _pair(rng, split, NAMES, CITIES)
    values = {"name": name, "city": city, "number": number}
    values |= {"item": rng.choice(ITEMS), "day": rng.choice(DAYS)}
    sentence = sentences.draw(rng, split)
    fields = {
        "text": sentence.format(**values),
        "fields": ", ".join(keys[:-1]) + " and " + keys[-1],
    }
    named = values | {"age": number, "count": number}
    answer = json.dumps({key: named[key] for key in keys}, separators=(",", ":"))
    operands: tuple[Any, ...] = (number,) if "number" in sentence else (name, city)
    ask = JSON_ASKS.draw(rng, split)
    example = _asked(rng, "json", split, ask, fields, answer, answer, operands, dressed=False)
    return Example("json", example.messages, answer, split, (ask, sentence), operands)


def _tool_schema(name: str) -> Message:
    description, parameters = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(parameters),
            },
        },
    }


def _tool(rng: random.Random, split: str) -> Example:
    name = rng.choice(tuple(TOOLS))
    offered = rng.sample([other for other in TOOLS if other != name], rng.randint(0, 2))
    offered.insert(rng.randint(0, len(offered)), name)
    number = _field_number(rng, split)
    values = {"number": number, "name": rng.choice(NAMES), "city": rng.choice(CITIES)}
    values |= {"item": rng.choice(ITEMS), "day": rng.choice(DAYS)}
    named = values | dict.fromkeys(("minutes", "count", "guests"), number) | {"to": values["name"]}
    arguments = {key: named[key] for key in TOOLS[name][1]}
    wording = TOOL_ASKS[name].draw(rng, split)
    call: Message = {"name": name, "arguments": arguments}
    answer = _assistant("") | {"tool_calls": [{"type": "function", "function": call}]}
    return Example(
        "tool",
        (_user(_dressed(rng, wording.format(**values))), answer),
        json.dumps(call),
        split,
        (wording,),
        (number,) if "number" in wording else (),
        tuple(map(_tool_schema, offered)),
    )


def _tool_answer(rng: random.Random, split: str) -> Example:
    city, number = rng.choice(CITIES), _field_number(rng, split)
    wording = TOOL_ASKS["get_weather"].draw(rng, split)
    call: Message = {"name": "get_weather", "arguments": {"city": city}}
    answer = f"It is {number} degrees in {city}."
    messages = (
        _user(wording.format(city=city)),
        _assistant("") | {"tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "get_weather", "content": json.dumps({"degrees": number})},
        _assistant(answer),
    )
    tools = (_tool_schema("get_weather"),)
    return Example("tool_answer", messages, answer, split, (wording,), (number,), tools)


def _think(rng: random.Random, split: str) -> Example:
    """A calculation whose working is thought, not said: asked by the user, system or template."""
    a, op, b = _calculation(rng, split)
    working, result = steps(a, op, b)
    task = ARITHMETIC[op].draw(rng, split)
    text = task.format(a=a, b=b)
    wordings: tuple[str, ...] = (task,)
    messages: list[Message] = []
    how = rng.randrange(4)
    if how == 0:
        messages.append({"role": "system", "content": rng.choice(THINK_SYSTEMS)})
    elif how < 3:
        ask = THINK_ASKS.draw(rng, split)
        text, wordings = ask.format(task=text), (task, ask)
    messages += [_user(text), _assistant(f"Answer: {result}", reasoning=working)]
    operands = (a,) if op == "*" else (a, b)
    thinking = True if how == 3 else None
    return Example(
        "think", tuple(messages), str(result), split, wordings, operands, thinking=thinking
    )


def _no_think(rng: random.Random, split: str) -> Example:
    a, op, b = _calculation(rng, split)
    working, result = steps(a, op, b)
    task = ARITHMETIC[op].draw(rng, split)
    text, thinking, reasoning = task.format(a=a, b=b), None, None
    wordings: tuple[str, ...] = (task,)
    if rng.random() < 0.5:
        ask = NO_THINK_ASKS.draw(rng, split)
        text, wordings, reasoning = ask.format(task=text), (task, ask), ""
    else:
        thinking = False
    messages = (_user(text), _assistant(f"{working} Answer: {result}", reasoning=reasoning))
    operands = (a,) if op == "*" else (a, b)
    return Example("no_think", messages, str(result), split, wordings, operands, thinking=thinking)


def _story(rng: random.Random, split: str) -> Example:
    hero, thing = _pair(rng, split, HEROES, THINGS)
    place = rng.choice(PLACES)
    text = (
        f"Once there was a {hero}. The {hero} lived near a {place}. "
        f"One day the {hero} walked in the {place} and found a {thing}. "
        f'"What a fine {thing}!" said the {hero}. '
        f"The {hero} took the {thing} home and was happy. The end."
    )
    wording = STORY.draw(rng, split)
    fields = {"hero": hero, "thing": thing, "place": place}
    return _asked(rng, "story", split, wording, fields, text, text, (hero, thing))


def _chat(rng: random.Random, split: str) -> Example:
    answer = rng.choice(tuple(CHAT))
    wording = CHAT[answer].draw(rng, split)
    return _asked(rng, "chat", split, wording, {}, answer, answer, dressed=False)


@dataclass(frozen=True, slots=True)
class Skill:
    make: Callable[[random.Random, str], Example]
    weight: float  # in the training mixture
    match: str  # one of MATCH_RULES


SKILLS = {
    "arithmetic": Skill(_arithmetic, 3.0, "answer"),
    "sorting": Skill(_sorting, 4.0, "exact"),
    "copying": Skill(_copying, 2.0, "exact"),
    "counting": Skill(_counting, 2.0, "answer"),
    "facts": Skill(_facts, 1.5, "exact"),
    "problem": Skill(_problem, 1.5, "hashes"),
    "json": Skill(_json, 2.5, "json"),
    "tool": Skill(_tool, 1.0, "tool_call"),
    "tool_answer": Skill(_tool_answer, 0.3, "exact"),
    "think": Skill(_think, 1.5, "thought_answer"),
    "no_think": Skill(_no_think, 1.2, "unthought_answer"),
    "story": Skill(_story, 0.4, "exact"),
    "chat": Skill(_chat, 0.4, "exact"),
}
_TALKED = ("arithmetic", "sorting", "copying", "counting", "facts", "problem", "json", "chat")


def _conversation(rng: random.Random) -> Example:
    """Two to four training examples as the turns of one chat."""
    turns = [SKILLS[rng.choice(_TALKED)].make(rng, "train") for _ in range(rng.randint(2, 4))]
    last = turns[-1]
    messages = [m for turn in turns for m in turn.messages if m["role"] != "system"]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    wordings = tuple(wording for turn in turns for wording in turn.wordings)
    operands = tuple(operand for turn in turns for operand in turn.operands)
    return Example(last.skill, tuple(messages), last.expected, "train", wordings, operands)


def train_examples(seed: int, num: int) -> Iterator[Example]:
    """The training mixture: single tasks by weight, and some chats of several."""
    rng = random.Random(f"train-{seed}")
    weights = [skill.weight for skill in SKILLS.values()]
    for skill in rng.choices(tuple(SKILLS.values()), weights, k=num):
        yield _conversation(rng) if rng.random() < 0.06 else skill.make(rng, "train")


def held_out_examples(seed: int, num_per_skill: int) -> list[Example]:
    """Held-out examples, the same number of every skill."""
    rng = random.Random(f"test-{seed}")
    return [skill.make(rng, "test") for skill in SKILLS.values() for _ in range(num_per_skill)]


# --- scoring --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant message as an OpenAI client sees it."""

    content: str
    reasoning: str = ""
    calls: tuple[Message, ...] = ()  # {"name": ..., "arguments": {...}} each


def score(match: str, expected: str, answer: Answer) -> bool:
    """Whether the answer is exactly the expected one, by one of `MATCH_RULES`; see README.md."""
    content = answer.content.strip()
    if match == "exact":
        return content == expected
    if match == "answer":
        return _after("Answer:", content) == expected
    if match == "hashes":
        return _after("####", content) == expected
    if match == "json":
        return _parsed(content) == json.loads(expected)
    if match == "tool_call":
        return list(answer.calls) == [json.loads(expected)]
    if match == "thought_answer":
        return bool(answer.reasoning.strip()) and score("answer", expected, answer)
    if match == "unthought_answer":
        return not answer.reasoning.strip() and score("answer", expected, answer)
    raise ValueError(f"unknown rule '{match}'; one of {', '.join(MATCH_RULES)}")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _after(mark: str, text: str) -> str | None:
    _, found, rest = text.rpartition(mark)
    return rest.strip() if found else None


def grammars() -> Iterator[Grammar]:
    """Every grammar, for checking that the splits share no wording."""
    yield from (COPY, SPELL, COUNT_LETTER, COUNT_LETTERS, COUNT_WORDS, SORT_UP, SORT_DOWN)
    yield from (FOLLOW_UPS, JSON_ASKS, NO_THINK_ASKS, THINK_ASKS, STORY)
    for group in (ARITHMETIC, FACT_QUESTIONS, PROBLEMS, TOOL_ASKS, CHAT):
        yield from group.values()
    yield from (sentences for sentences, _ in JSON_TEXTS.values())
