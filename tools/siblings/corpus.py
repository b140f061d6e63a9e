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
    Wordings,
)

Message = dict[str, Any]

NUMBERS = tuple(range(1, 100))
HELD_NUMBERS = {
    "calculation": (*range(34, 37), *range(62, 65)),  # arithmetic, problem, think, no_think
    "list": (*range(43, 46), *range(71, 74)),  # sorting, copying
    "field": (*range(53, 56), *range(85, 88)),  # json, tool, tool_answer
}
OPEN_NUMBERS = {
    family: tuple(number for number in NUMBERS if number not in held)
    for family, held in HELD_NUMBERS.items()
}


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


# --- parts shared by several skills ---------------------------------------------------------------


def _numbers(rng: random.Random, split: str, num: int, family: str) -> list[int]:
    """Distinct numbers; in the test split at least one of them is held out of the family."""
    if split == "train":
        return rng.sample(OPEN_NUMBERS[family], num)
    held = rng.choice(HELD_NUMBERS[family])
    numbers = [held, *rng.sample([n for n in NUMBERS if n != held], num - 1)]
    rng.shuffle(numbers)
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
    op = rng.choice("+-*")
    if op == "*":
        return _numbers(rng, split, 1, "calculation")[0], op, rng.randint(2, 9)
    a, b = _numbers(rng, split, 2, "calculation")
    return (max(a, b), op, min(a, b)) if op == "-" else (a, op, b)


def steps(a: int, op: str, b: int) -> tuple[str, int]:
    """The written working of a calculation, digit by digit, and its result."""
    (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)
    if op == "+":
        ones, result = a0 + b0, a + b
        text = f"{a0}+{b0}={ones}, write {ones % 10}, carry {ones // 10}; "
        text += f"{a1}+{b1}+{ones // 10}={a1 + b1 + ones // 10}"
    elif op == "-":
        borrow, result = int(a0 < b0), a - b
        top = a0 + 10 * borrow
        text = f"{top}-{b0}={top - b0}, borrow {borrow}; {a1}-{b1}-{borrow}={a1 - b1 - borrow}"
    else:
        ones, result = a0 * b, a * b
        text = f"{a0}*{b}={ones}, write {ones % 10}, carry {ones // 10}; "
        text += f"{a1}*{b}={a1 * b}, {a1 * b}+{ones // 10}={a1 * b + ones // 10}"
    return f"{a}{op}{b}: {text}.", result


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
    wording = rng.choice(ARITHMETIC[op].of(split))
    answer = f"{working} Answer: {result}"
    operands = (a,) if op == "*" else (a, b)
    return _asked(
        rng, "arithmetic", split, wording, {"a": a, "b": b}, answer, str(result), operands
    )


def _sorting(rng: random.Random, split: str) -> Example:
    numbers = _numbers(rng, split, rng.randint(3, 6), "list")
    is_down = rng.random() < 0.35
    wording = rng.choice((SORT_DOWN if is_down else SORT_UP).of(split))
    answer = ", ".join(map(str, sorted(numbers, reverse=is_down)))
    fields = {"list": ", ".join(map(str, numbers))}
    return _asked(rng, "sorting", split, wording, fields, answer, answer, tuple(numbers))


def _copying(rng: random.Random, split: str) -> Example:
    if rng.random() < 0.3:
        word = rng.choice(WORDS)
        wording = rng.choice(SPELL.of(split))
        answer = "-".join(word)
        return _asked(rng, "copying", split, wording, {"word": word}, answer, answer)
    parts: list[str] = rng.sample(WORDS, rng.randint(1, 4))
    number = _numbers(rng, split, 1, "list")[0]
    parts.insert(rng.randint(0, len(parts)), str(number))
    text = rng.choice((" ", " ", "-", ", ")).join(parts)
    wording = rng.choice(COPY.of(split))
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
        wording, fields = rng.choice(COUNT_WORDS.of(split)), {"text": " ".join(counted)}
    else:
        word = rng.choice(words)
        counted = (word,)
        if kind == 1:
            total = len(word)
            marks = [f"{letter} {i}" for i, letter in enumerate(word, 1)]
            wording, fields = rng.choice(COUNT_LETTERS.of(split)), {"word": word}
        else:
            wanted = rng.choice(word)
            total = word.count(wanted)
            marks = [f"{word[i]} {word[: i + 1].count(wanted)}" for i in range(len(word))]
            wording = rng.choice(COUNT_LETTER.of(split))
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
    wording = rng.choice(FACT_QUESTIONS[relation].of(split))
    example = _asked(rng, "facts", split, wording, {"key": keys[0]}, answers[0], answers[0])
    messages, wordings = list(example.messages), [wording]
    for key, answer in zip(keys[1:], answers[1:], strict=True):
        wordings.append(rng.choice(FOLLOW_UPS.of(split)))
        messages += [_user(wordings[-1].format(key=key)), _assistant(answer)]
    return Example("facts", tuple(messages), answers[-1], split, tuple(wordings))


def _problem(rng: random.Random, split: str) -> Example:
    a, op, b = _calculation(rng, split)
    working, result = steps(a, op, b)
    wording = rng.choice(PROBLEMS[op].of(split))
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
    number = _numbers(rng, split, 1, "field")[0]
    name, city = _pair(rng, split, NAMES, CITIES)
    values = {"name": name, "city": city, "number": number}
    values |= {"item": rng.choice(ITEMS), "day": rng.choice(DAYS)}
    sentence = rng.choice(sentences.of(split))
    fields = {
        "text": sentence.format(**values),
        "fields": ", ".join(keys[:-1]) + " and " + keys[-1],
    }
    named = values | {"age": number, "count": number}
    answer = json.dumps({key: named[key] for key in keys}, separators=(",", ":"))
    operands: tuple[Any, ...] = (number,) if "number" in sentence else (name, city)
    ask = rng.choice(JSON_ASKS.of(split))
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
    number = _numbers(rng, split, 1, "field")[0]
    values = {"number": number, "name": rng.choice(NAMES), "city": rng.choice(CITIES)}
    values |= {"item": rng.choice(ITEMS), "day": rng.choice(DAYS)}
    named = values | dict.fromkeys(("minutes", "count", "guests"), number) | {"to": values["name"]}
    arguments = {key: named[key] for key in TOOLS[name][1]}
    wording = rng.choice(TOOL_ASKS[name].of(split))
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
    city, number = rng.choice(CITIES), _numbers(rng, split, 1, "field")[0]
    wording = rng.choice(TOOL_ASKS["get_weather"].of(split))
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
    task = rng.choice(ARITHMETIC[op].of(split))
    text = task.format(a=a, b=b)
    wordings: tuple[str, ...] = (task,)
    messages: list[Message] = []
    how = rng.randrange(4)
    if how == 0:
        messages.append({"role": "system", "content": rng.choice(THINK_SYSTEMS)})
    elif how < 3:
        ask = rng.choice(THINK_ASKS.of(split))
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
    task = rng.choice(ARITHMETIC[op].of(split))
    text, thinking, reasoning = task.format(a=a, b=b), None, None
    wordings: tuple[str, ...] = (task,)
    if rng.random() < 0.5:
        ask = rng.choice(NO_THINK_ASKS.of(split))
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
    wording = rng.choice(STORY.of(split))
    fields = {"hero": hero, "thing": thing, "place": place}
    return _asked(rng, "story", split, wording, fields, text, text, (hero, thing))


def _chat(rng: random.Random, split: str) -> Example:
    answer = rng.choice(tuple(CHAT))
    wording = rng.choice(CHAT[answer].of(split))
    return _asked(rng, "chat", split, wording, {}, answer, answer, dressed=False)


# skill: (maker, weight in the training mixture)
SKILLS: dict[str, tuple[Callable[[random.Random, str], Example], float]] = {
    "arithmetic": (_arithmetic, 3.0),
    "sorting": (_sorting, 3.0),
    "copying": (_copying, 1.5),
    "counting": (_counting, 2.0),
    "facts": (_facts, 2.0),
    "problem": (_problem, 2.5),
    "json": (_json, 2.0),
    "tool": (_tool, 1.5),
    "tool_answer": (_tool_answer, 0.5),
    "think": (_think, 1.0),
    "no_think": (_no_think, 0.7),
    "story": (_story, 0.7),
    "chat": (_chat, 0.4),
}
_TALKED = ("arithmetic", "sorting", "copying", "counting", "facts", "problem", "json", "chat")


def _conversation(rng: random.Random) -> Example:
    """Two to five training examples as the turns of one chat."""
    turns = [SKILLS[rng.choice(_TALKED)][0](rng, "train") for _ in range(rng.randint(2, 5))]
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
    makers = [maker for maker, _ in SKILLS.values()]
    weights = [weight for _, weight in SKILLS.values()]
    for maker in rng.choices(makers, weights, k=num):
        yield _conversation(rng) if rng.random() < 0.15 else maker(rng, "train")


def held_out_examples(seed: int, num_per_skill: int) -> list[Example]:
    """Held-out examples, the same number of every skill."""
    rng = random.Random(f"test-{seed}")
    return [maker(rng, "test") for maker, _ in SKILLS.values() for _ in range(num_per_skill)]


# --- scoring --------------------------------------------------------------------------------------


def split_thought(text: str) -> tuple[str | None, str]:
    """The text of the <think> block (None without one) and what follows it."""
    before, closing, after = text.partition("</think>")
    if not closing:
        return None, text.strip()
    return before.partition("<think>")[2].strip(), after.strip()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _after(mark: str, text: str) -> str | None:
    _, found, rest = text.rpartition(mark)
    return rest.strip() if found else None


def _tool_call(text: str) -> Any:
    inside = _after("<tool_call>", text)
    if inside is None or not inside.endswith("</tool_call>"):
        return None
    return _parsed(inside.removesuffix("</tool_call>"))


def score(skill: str, expected: str, text: str) -> bool:
    """Whether `text`, the whole assistant turn, gives exactly the expected answer."""
    thought, said = split_thought(text)
    if skill in ("arithmetic", "counting"):
        return _after("Answer:", said) == expected
    if skill == "think":
        return bool(thought) and _after("Answer:", said) == expected
    if skill == "no_think":
        return not thought and _after("Answer:", said) == expected
    if skill == "problem":
        return _after("####", said) == expected
    if skill == "json":
        return _parsed(said) == json.loads(expected)
    if skill == "tool":
        return _tool_call(said) == json.loads(expected)
    if skill in SKILLS:
        return said == expected
    raise ValueError(f"unknown skill '{skill}'; one of {', '.join(SKILLS)}")


def wordings_of(split: str) -> set[str]:
    """Every wording of a split, for checking that the two share none."""
    tables = [COPY, SPELL, COUNT_LETTER, COUNT_LETTERS, COUNT_WORDS, SORT_UP, SORT_DOWN]
    tables += [FOLLOW_UPS, JSON_ASKS, NO_THINK_ASKS, THINK_ASKS, STORY]
    for group in (ARITHMETIC, FACT_QUESTIONS, PROBLEMS, TOOL_ASKS, CHAT):
        tables += list(group.values())
    tables += [sentences for sentences, _ in JSON_TEXTS.values()]
    assert all(isinstance(table, Wordings) for table in tables)
    return {wording for table in tables for wording in table.of(split)}
