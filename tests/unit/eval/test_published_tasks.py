"""Published tasks: what is asked, which answers are found, how endings are weighed, the table."""

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.eval_flags import TASKS as NAMES
from penstock.errors import ConfigError
from penstock.eval.likelihood import Chance, Weighed, weighed, windows
from penstock.eval.published import pick
from penstock.eval.published_run import RunOptions, prepare
from penstock.eval.table import Score, as_text, share
from penstock.eval.task import Response
from penstock.eval.tasks import TASKS

FILTERS = ("flexible-extract", "strict-match")
SHARED = Path(__file__).parents[4] / "shared"


def write(path: Path, rows: list[dict]) -> Path:
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


class Says:
    """Answers what it was told; weighs an id by its own size."""

    def __init__(self, *responses: str) -> None:
        self.responses = list(responses)
        self.examples: list = []

    def ask(self, examples, max_tokens):
        self.examples, self.max_tokens = list(examples), max_tokens
        return [Response(text) for text in self.responses]

    def chances(self, asked):
        return [[Chance(-float(i), False) for i in one.ids[one.begin :]] for one in asked]


def encode(text: str) -> list[int]:
    """A token to a letter."""
    return [ord(letter) for letter in text]


def run(name: str, asker: Says, **options):
    return prepare(name, TASKS[name], RunOptions(**options))(asker, lambda: encode)


def test_the_command_line_knows_every_task():
    assert tuple(TASKS) == NAMES


def test_gsm8k_shows_examples_and_finds_numbers_strictly_and_flexibly(tmp_path):
    write(tmp_path / "gsm8k_train.jsonl.gz", [{"question": "q1", "answer": "a #### 1"}] * 5)
    write(tmp_path / "gsm8k_test.jsonl", [{"question": "2 + 2?", "answer": "Sum.\n#### 1,004"}] * 5)
    asker = Says("#### 1004", "It is $1,004.", "#### 7 or 1004", "no", "#### -1004")
    results = run("gsm8k", asker, data=tmp_path)
    [first, *_] = asker.examples
    assert first.prompt == "Question: q1\nAnswer: a #### 1\n\n" * 5 + "Question: 2 + 2?\nAnswer:"
    assert "Question:" in first.stop
    assert first.messages == ()
    found = {one.filter: one.value for one in results.scores}
    assert found == {"flexible-extract": 3 / 5, "strict-match": 1 / 5}
    assert [one["strict-match"] for one in results.examples] == [True, *[False] * 4]


def test_a_chat_template_and_a_system_prompt_are_applied_when_asked_for(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"question": "q", "answer": "#### 1"}] * 3)
    asker = Says("1", "2")
    options = {"apply_chat_template": True, "system_prompt": "Be short.", "limit": 2}
    results = run("gsm8k", asker, data=path, num_fewshot=0, max_tokens=9, **options)
    assert len(results.examples) == 2
    assert asker.max_tokens == 9
    assert [one["role"] for one in asker.examples[0].messages] == ["system", "user"]
    assert asker.examples[0].messages[1]["content"] == "Question: q\nAnswer:"


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        (r"so \boxed{033}", True),
        (r"\boxed{12} no, \boxed{ 33 }", True),
        ("The answer is 33.", True),
        (r"\boxed{3} 33", False),
        ("", False),
    ],
)
def test_aime_takes_the_last_box_else_the_last_number(tmp_path, said, is_right):
    path = write(tmp_path / "aime_2025.jsonl", [{"problem": "p", "answer": "033"}])
    results = run("aime25", Says(said), data=path)
    assert results.scores[0].value == is_right


def test_gpqa_mixes_the_answers_and_reads_the_letter(tmp_path):
    path = tmp_path / "gpqa_diamond.csv"
    head = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
    path.write_text(head + "why?,right,x,y,z\n" * 40)
    asker = Says(*["I think so.\nAnswer: (B)"] * 40)
    results = run("gpqa", asker, data=tmp_path)
    for example, seen in zip(asker.examples, results.examples, strict=True):
        text = example.messages[0]["content"]
        letter = re.search(r"^([A-D])\) right$", text, re.MULTILINE)[1]
        assert example.expected == letter
        assert seen["letter"] == (letter == "B")
    assert 0.05 < results.scores[0].value < 0.6


def test_mmlu_shows_examples_of_the_subject_and_weighs_letters(tmp_path):
    def row(subject: str, question: str, response: int) -> dict:
        choices = ["one", "two", "three", "four"]
        return {"subject": subject, "question": question, "choices": choices, "answer": response}

    shots = [row(s, f"{s} shot {i}", i) for s in ("law", "old_art") for i in range(2)]
    write(tmp_path / "mmlu_dev.jsonl.gz", shots)
    rows = [row("law", "now?", 0), row("old_art", "then?", 3), row("law", "ever?", 2)]
    write(tmp_path / "mmlu_test.jsonl.gz", rows)
    results = run("mmlu", Says(), data=tmp_path, num_fewshot=2)
    assert results.examples[1]["asked"] == (
        "The following are multiple choice questions (with answers) about old art.\n\n"
        "old_art shot 0\nA. one\nB. two\nC. three\nD. four\nAnswer: A\n\n"
        "old_art shot 1\nA. one\nB. two\nC. three\nD. four\nAnswer: B\n\n"
        "then?\nA. one\nB. two\nC. three\nD. four\nAnswer:"
    )
    # `Says` finds A likeliest, always.
    assert [one["logprobs"] for one in results.examples] == [[-97.0, -98.0, -99.0, -100.0]] * 3
    values = {one.task.strip(" -"): one.value for one in results.scores}
    assert values == {"mmlu": 1 / 3, "law": 1 / 2, "old_art": 0.0}
    limited = run("mmlu", Says(), data=tmp_path, num_fewshot=0, limit=1)
    assert len(limited.examples) == 2
    with pytest.raises(ConfigError, match="less than 3 examples of law"):
        run("mmlu", Says(), data=tmp_path, num_fewshot=3)


def test_hellaswag_weighs_endings_by_length_too(tmp_path):
    row = {"activity_label": "Cooking", "ctx": "A pan. she", "endings": ["zz", "aaa"], "label": 1}
    results = run("hellaswag", Says(), data=write(tmp_path / "h.jsonl", [row | {"label": 0}]))
    [seen] = results.examples
    assert seen["asked"] == "Cooking: A pan. She"
    blank, z, a = 32.0, 122.0, 97.0
    assert seen["logprobs"] == [-(blank + 2 * z), -(blank + 3 * a)]
    assert (seen["acc"], seen["acc_norm"]) == (True, False)  # 276 < 323, but 138 > 107.7


def test_perplexity_is_over_tokens_words_and_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\x01\x02 \x01é")
    results = run("perplexity", Says(), data=path, max_input_len=3)
    values = {one.metric: one.value for one in results.scores}
    weight = 2 + 32 + 1 + 233
    assert values["token_perplexity"] == pytest.approx(2.718281828 ** (weight / 4))
    assert values["byte_perplexity"] == pytest.approx(2.718281828 ** (weight / 6))
    assert values["bits_per_byte"] == pytest.approx(weight / 6 / 0.69314718)
    assert all(not one.more_is_better for one in results.scores)


@given(num=st.integers(2, 200), max_len=st.integers(2, 50))
def test_windows_weigh_every_token_but_the_first_once(num, max_len):
    pieces = windows(range(num), max_len)
    assert [one for piece in pieces for one in piece.ids[piece.begin :]] == list(range(1, num))
    assert all(1 < len(piece.ids) <= max_len for piece in pieces)


def test_a_blank_at_the_end_of_the_context_is_weighed_with_the_ending():
    assert weighed(encode, "ab ", "c") == Weighed(tuple(encode("ab c")), 2)
    assert weighed(encode, "abcd", "ef", max_len=3) == Weighed(tuple(encode("def")), 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recipes are not at hand")
def test_the_table_is_the_recipes_letter_by_letter():
    text = (SHARED / "recipes" / "llama-3.3-70b.md").read_text()
    expected = re.findall(r"^\|Tasks\|.*\n(?:\|.*\n)+", text, re.MULTILINE)[0].rstrip()
    values = re.findall(r"\|(0\.\d{4})\|±  \|(0\.\d{4})\|", expected)
    scores = [
        Score(
            task="gsm8k", version=3, num_fewshot=5, metric="exact_match", filter=filter,
            value=float(value), stderr=float(stderr),
        )
        for filter, (value, stderr) in zip(FILTERS, values, strict=True)
    ]  # fmt: skip
    assert as_text(scores) == expected


def test_the_error_is_that_of_a_sample():
    one = share("t", 1, 0, "acc", [True] * 3 + [False])
    assert one.value == 0.75
    assert one.stderr == pytest.approx(0.25)  # sqrt(0.75 * 0.25 / 3)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data are not at hand")
@pytest.mark.parametrize(
    ("name", "num"), [("gsm8k", 1319), ("mmlu", 14042), ("hellaswag", 10042), ("aime24", 30)]
)
def test_the_real_files_are_read_whole(name, num):
    task = TASKS[name]
    folder = SHARED / "data"
    data = pick(folder, task.file_names)
    shots = pick(folder, task.shot_names) if task.shot_names else None
    assert len(task.read(data, shots, task.num_fewshot)) == num


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"question": "q"}], "example 1 has no 'answer'"),
        ([], "has no examples"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, rows, complaint):
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(ConfigError, match=complaint):
        run("gsm8k", Says(), data=path, num_fewshot=0)
    with pytest.raises(ConfigError, match=r"has none of gsm8k_test\.jsonl"):
        run("gsm8k", Says(), data=tmp_path)
    with pytest.raises(ConfigError, match="--shots FILE"):
        run("gsm8k", Says(), data=write(tmp_path / "y.jsonl", [{"question": "q", "answer": "a"}]))
