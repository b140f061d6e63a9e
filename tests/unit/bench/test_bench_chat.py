"""`penstock bench chat` against a server that does what it is told, and what it is made of."""

import asyncio
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_http import ScriptedHttp, chunked, http

from penstock.bench.chat import ChatOptions, Talks, arrival_times_s, talk_all
from penstock.bench.chat_report import as_json, report_of, table
from penstock.bench.conversations import FileLengths, LogNormalLengths, Turn, Workload, read_lengths
from penstock.bench.load import Arrivals
from penstock.bench.results import read_series, save
from penstock.cli.main import main
from penstock.errors import BackendError, ConfigError

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "chat.py"
LENGTHS = FileLengths([[Turn(5, 3), Turn(6, 2), Turn(7, 4)]], is_grouped=True)


def num_words(body):
    if "messages" in body:
        return sum(len(one["content"].split()) for one in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


class ChatServer(ScriptedHttp):
    """Answers with words of its own; `cached` of a prompt is what the last one had, and so on."""

    def __init__(self, pause_s=0.0):
        super().__init__(self.answer, pause_s)
        self.unknown = ()  # fields that are refused
        self.failing = ()  # numbers of requests
        self.reports_cached = True
        self.id_field = None  # which asks for ids
        self.asked = []  # bodies without those that only find out
        self.num_tests = 0

    def answer(self, path, body):
        if path == "/v1/models":
            return [http(b'{"data": [{"id": "some-model"}]}')]
        if unknown := [name for name in self.unknown if name in body]:
            return [http(f"what is {unknown[0]}?".encode(), "400 Bad Request")]
        num = body.get("max_completion_tokens") or body["max_tokens"]
        if num_words(body) <= 10:  # eight words, and who speaks where there is no template
            self.num_tests += 1
        else:
            self.asked.append(body)
            if len(self.asked) - 1 in self.failing:
                return [http(b"no room", "503 Service Unavailable")]
        return chunked(*self.events(body, num), "data: [DONE]\n\n")

    def events(self, body, num):
        number = len(self.asked)
        for place in range(num):
            said = f" a{number}.{place}"
            choice = {"delta": {"content": said}} if "messages" in body else {"text": said}
            if self.id_field is not None and self.id_field in body:
                choice["token_ids"] = [100_000 + number * 100 + place]
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": num_words(body), "completion_tokens": num}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached(body)}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"

    def cached(self, body):
        return 10 if len(body.get("messages", ())) > 2 else 0


@pytest.fixture
def server():
    with ChatServer() as server:
        yield server


def options_for(server, **changes):
    usual = {
        "workload": Workload(lengths=LENGTHS, system_tokens=12),
        "num_conversations": 3,
        "show_progress": False,
    }
    return ChatOptions(url=server.url, **(usual | changes))


def talk(server, **changes) -> Talks:
    return asyncio.run(talk_all(options_for(server, **changes), lambda line: None))


def by_conversation(bodies):
    """Requests of one conversation have the same first user turn."""
    found = {}
    for body in bodies:
        found.setdefault(body["messages"][1]["content"], []).append(body)
    return list(found.values())


def test_later_turns_send_the_shared_system_prompt_and_all_that_was_said(server):
    talks = talk(server)
    assert [len(one.responses) for one in talks.talks] == [3, 3, 3]
    conversations = by_conversation(server.asked)
    assert [len(one) for one in conversations] == [3, 3, 3]
    systems = {body["messages"][0]["content"] for body in server.asked}
    assert len(systems) == 1 and len(systems.pop().split()) == 12
    answers = {tuple(one.text for one in talk.responses) for talk in talks.talks}
    for bodies in conversations:
        assert [body["max_completion_tokens"] for body in bodies] == [3, 2, 4]
        last = bodies[-1]["messages"]
        assert [one["role"] for one in last] == ["system", *["user", "assistant"] * 2, "user"]
        assert [len(one["content"].split()) for one in last if one["role"] == "user"] == [5, 6, 7]
        for earlier in bodies[:-1]:
            assert last[: len(earlier["messages"])] == earlier["messages"]
        said = tuple(one["content"] for one in last if one["role"] == "assistant")
        assert any(said == whole[:2] for whole in answers)
        assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
        assert all(body["ignore_eos"] is True and body["stream"] is True for body in bodies)
        assert all(body["model"] == "some-model" for body in bodies)


def test_the_same_seed_asks_the_same_and_another_does_not(server):
    def firsts(seed):
        del server.asked[:]
        workload = Workload(seed=seed, turns=(1, 1), max_user_tokens=30, max_answer_tokens=5)
        talk(server, workload=workload, max_concurrency=1)
        return [body["messages"] for body in server.asked]

    one = firsts(1)
    assert len(one) == 3
    assert firsts(1) == one
    assert all(a != b for a, b in zip(one, firsts(2), strict=True))


def test_cached_tokens_are_summed_by_class_and_reuse_that_is_missing_is_told(server):
    long = {"workload": Workload(lengths=LENGTHS, system_tokens=140)}
    talks = talk(server, **long)
    report = report_of(talks, options_for(server))
    first, later = report.classes["first"], report.classes["later"]
    assert (len(first.responses), len(later.responses)) == (3, 6)
    assert (first.num_cached, later.num_cached) == (0, 60)
    # 140 + 5 words, 3 said, 6 more words, 2 said, 7 more words
    assert later.cached_share == pytest.approx(60 / (3 * (154 + 163)))
    assert report.figures.total_input == 3 * (145 + 154 + 163)
    assert report.figures.total_output == 3 * 9
    assert not any("cached" in one for one in report.warnings)

    server.cached = lambda body: 10 if len(body.get("messages", ())) > 4 else 0
    talks = talk(server, **long)
    [told] = [one for one in report_of(talks, options_for(server)).warnings if "cached" in one]
    assert told.startswith("3 of 6 later turns had no cached tokens")
    quiet = report_of(talks, options_for(server), check_reuse=False)
    assert not any("cached" in one for one in quiet.warnings)

    short = report_of(talk(server), options_for(server))  # may be less than a block
    assert not any("cached" in one for one in short.warnings)

    server.reports_cached = False
    report = report_of(talk(server, **long), options_for(server))
    assert report.classes["later"].num_cached is None
    assert any("does not say how many prompt tokens were cached" in one for one in report.warnings)
    assert "The server does not report cached tokens." in table(report)


def test_a_failed_turn_ends_its_conversation_and_is_counted_by_reason(server):
    server.failing = (1, 3)
    talks = talk(server, max_concurrency=1)
    assert [[one.error is None for one in talk.responses] for talk in talks.talks] == [
        [True, False],
        [True, False],
        [True, True, True],
    ]
    report = report_of(talks, options_for(server))
    assert report.reasons == {"status 503": 2}
    assert report.examples == {"status 503": "status 503: no room"}
    assert (report.figures.completed, report.figures.num_failed, report.num_not_sent) == (5, 2, 2)
    assert talks.tally.num_requests == talks.tally.num_ended == 7
    printed = table(report)
    assert "Failed turns:                            2" in printed
    assert "Turns not sent after a failed one:       2" in printed


@pytest.mark.parametrize(
    ("unknown", "field", "told"),
    [
        ((), "ignore_eos", False),
        (("ignore_eos",), "min_tokens", False),
        (("ignore_eos", "min_tokens"), None, True),
    ],
)
def test_only_what_the_server_takes_is_sent(server, unknown, field, told):
    server.unknown = unknown
    talks = talk(server)
    assert talks.terms.length_field == field
    sent = {name for body in server.asked for name in ("ignore_eos", "min_tokens") if name in body}
    assert sent == ({field} if field else set())
    if field == "min_tokens":
        assert all(one["min_tokens"] == one["max_completion_tokens"] for one in server.asked)
    warnings = report_of(talks, options_for(server)).warnings
    assert any("takes neither" in one for one in warnings) == told


def test_a_server_that_refuses_everything_is_told_at_once(server):
    server.unknown = ("stream",)
    with pytest.raises(BackendError, match=r"the test request failed: status 400: what is stream"):
        talk(server)
    server.unknown = ("ignore_eos",)
    talk(server, ignore_eos=False)
    assert len(server.asked) == 9


@pytest.mark.parametrize("id_field", ["return_token_ids", "detokenize"])
def test_ids_of_answers_go_into_the_history_where_the_server_sends_them(server, id_field):
    server.id_field = id_field
    server.unknown = {"return_token_ids", "detokenize"} - {id_field}
    ids = {"backend": "openai", "random_ids": True, "max_concurrency": 1}
    talks = talk(server, **ids, num_conversations=1)
    assert talks.terms.returns_ids
    prompts = [body["prompt"] for body in server.asked]
    assert [len(one) for one in prompts] == [12 + 5, 17 + 3 + 6, 26 + 2 + 7]
    assert prompts[1][:17] == prompts[0]
    assert prompts[1][17:20] == talks.talks[0].responses[0].token_ids == [100100, 100101, 100102]
    assert prompts[2][:26] == prompts[1]
    made_up = [one for one in prompts[2] if one < 100_000]
    assert all(1250 <= one < 10_000 for one in made_up) and len(made_up) == 12 + 5 + 6 + 7
    assert not any("ids" in one for one in report_of(talks, options_for(server, **ids)).warnings)


def test_made_up_ids_stand_for_answers_whose_ids_do_not_come(server):
    ids = {"backend": "openai", "random_ids": True}
    talks = talk(server, **ids, num_conversations=1)
    prompts = [body["prompt"] for body in server.asked]
    assert [len(one) for one in prompts] == [17, 26, 35]
    assert prompts[2][:26] == prompts[1]
    told = report_of(talks, options_for(server, **ids)).warnings
    assert any("the server returns no token ids" in one for one in told)
    with pytest.raises(ConfigError, match="needs --backend openai"):
        talk(server, random_ids=True)


def test_without_a_chat_template_the_conversation_is_one_text(server):
    talk(server, backend="openai", num_conversations=1)
    first, second, third = (body["prompt"] for body in server.asked)
    assert second.startswith(f"{first} a1.0 a1.1 a1.2\nUser: ")
    assert third.startswith(f"{second} a2.0 a2.1\nUser: ")
    assert third.endswith("\nAssistant:")


def test_conversations_begin_in_the_order_of_a_poisson_process(server):
    wanted = options_for(server, arrivals=Arrivals(rate=20.0, seed=3), num_conversations=12)
    times = arrival_times_s(wanted)
    talks = asyncio.run(talk_all(wanted, lambda line: None))
    begun = [one.responses[0].started_at for one in talks.talks]
    assert begun == sorted(begun)
    for at, due in zip(begun, times, strict=True):
        assert -0.001 <= at - talks.ran.begun_at - due < 0.5
    long = options_for(server, arrivals=Arrivals(rate=50.0, seed=1), seconds=100.0)
    long = ChatOptions(url=long.url, arrivals=long.arrivals, seconds=100.0)
    assert len(arrival_times_s(long)) == pytest.approx(5000, rel=0.05)
    assert max(arrival_times_s(long)) == pytest.approx(100.0, abs=0.5)


def test_for_so_many_seconds_a_new_conversation_follows_on_an_old_one():
    with ChatServer(pause_s=0.005) as server:
        talks = talk(server, seconds=0.4, num_conversations=None, max_concurrency=2)
        assert server.most_open <= 2
    assert len(talks.talks) > 2
    assert sorted(one.number for one in talks.talks) == list(range(len(talks.talks)))
    assert all(len(one.responses) == 3 for one in talks.talks)  # those begun are ended
    assert 0.4 <= talks.ran.duration_s < 5.0
    with pytest.raises(ConfigError, match="--max_concurrency"):
        talk(server, seconds=1.0)


def test_a_server_that_refuses_is_not_asked_as_fast_as_it_can(server):
    server.failing = range(100_000)
    talks = talk(server, seconds=0.5, num_conversations=None, max_concurrency=3)
    assert 3 <= len(server.asked) == len(talks.talks) <= 6  # a sleep may end a moment early


def test_no_more_conversations_run_than_the_limit_and_users_think(server):
    talks = talk(server, max_concurrency=2, num_conversations=5, think_s=0.05)
    assert server.most_open <= 2
    for one in talks.talks:
        for before, after in zip(one.responses, one.responses[1:], strict=False):
            assert after.started_at - before.last_at >= 0.045


def test_lengths_are_bounded_and_like_those_of_sharegpt():
    workload = Workload(lengths=LogNormalLengths(), turns=(1, 4))
    conversations = [workload.conversation(number) for number in range(4000)]
    assert {len(one) for one in conversations} == {1, 2, 3, 4}
    turns = [turn for one in conversations for turn in one]
    user, answers = [one.num_user for one in turns], [one.num_answer for one in turns]
    assert min(user) >= 4 and max(user) == 1024
    assert min(answers) >= 4 and max(answers) == 1024
    assert statistics.mean(user) == pytest.approx(214, rel=0.05)
    assert statistics.mean(answers) == pytest.approx(202, rel=0.05)
    assert statistics.quantiles(user, n=10)[-1] == pytest.approx(649, rel=0.08)
    assert statistics.quantiles(answers, n=10)[-1] == pytest.approx(491, rel=0.08)
    short = Workload(max_user_tokens=20, max_answer_tokens=2).conversation(0)
    assert all(4 <= one.num_user <= 20 and one.num_answer == 2 for one in short)


def test_lengths_come_from_a_file_by_turn_or_by_conversation(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens,turns\n34,244,12\n9,5000,2\n")
    drawn = [Workload(lengths=read_lengths(path)).conversation(number) for number in range(50)]
    assert {turn for one in drawn for turn in one} == {Turn(34, 244), Turn(9, 1024)}
    assert {len(one) for one in drawn} == {1, 2, 3, 4}

    path = tmp_path / "lengths.jsonl"
    lines = [("a", 10, 20), ("b", 5, 6), ("a", 11, 21), ("a", 12, 22)]
    path.write_text(
        "".join(
            json.dumps({"conversation": name, "prompt_tokens": i, "output_tokens": o}) + "\n"
            for name, i, o in lines
        )
    )
    lengths = read_lengths(path)
    drawn = {tuple(lengths.draw(random.Random(seed), 1, 2)) for seed in range(20)}
    assert drawn == {(Turn(10, 20), Turn(11, 21)), (Turn(5, 6),)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no turn"),
        ("prompt_tokens\n3\n", ":2 has no prompt_tokens and output_tokens"),
        ('{"prompt_tokens": 3, "output_tokens": "many"}\n', ":1 has no"),
        ("conversation,prompt_tokens,output_tokens\n", "holds no turn"),
        ('{"prompt_tokens":1,"output_tokens":2}\n{"prompt_tokens":1}\n', ":2 has no"),
        (
            '{"prompt_tokens":1,"output_tokens":2,"conversation":1}\n'
            '{"prompt_tokens":1,"output_tokens":2}\n',
            "some turns have a conversation and some have none",
        ),
    ],
)
def test_a_broken_file_of_lengths_is_told_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "broken"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_lengths(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_lengths(tmp_path / "none")


def test_times_of_first_and_later_turns_are_apart(server, tmp_path):
    talks = talk(server)
    for one in talks.talks:  # times as a server might have made them
        for place, response in enumerate(one.responses):
            begun = talks.ran.begun_at + place
            response.started_at, response.first_at = begun, begun + (0.2 if place == 0 else 0.05)
            response.gaps_s[:] = type(response.gaps_s)("d", [0.01] * (response.num_output - 1))
            response.last_at = response.first_at + 0.01 * (response.num_output - 1)
    report = report_of(talks, options_for(server))
    record = as_json(report, talks, options_for(server))
    assert record["chat"]["first_turns"]["p90_ttft_ms"] == pytest.approx(200)
    assert record["chat"]["later_turns"]["p90_ttft_ms"] == pytest.approx(50)
    assert record["p99_tpot_ms"] == pytest.approx(10)
    assert record["median_itl_ms"] == pytest.approx(10)
    assert record["median_e2el_ms"] == pytest.approx(80)  # 220, 60, 80
    printed = table(report)
    assert "Time to First Token, first turns" in printed
    assert "Time to First Token, later turns" in printed
    save(tmp_path / "chat.json", record)
    [run] = read_series(tmp_path / "chat.json").runs  # `bench compare` and `report` read it
    assert run.value("output_throughput") == record["output_throughput"] > 0


def test_the_command_prints_a_line_a_table_and_writes_json(server, tmp_path, capsys):
    out = tmp_path / "out" / "chat.json"
    flags = ["--num_conversations", "4", "--turns", "2", "--max_user_tokens", "20"]
    flags += ["--max-answer-tokens", "6", "--system_tokens", "16", "--seed", "7"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--base_url", server.url, "--result_json", str(out), *flags])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == (
        f"some-model at {server.url}/v1/chat/completions: 4 conversations of 2 turns, all at once, "
        "after 16 tokens that all share, seed 7"
    )
    assert "Successful turns:                        8" in said
    record = json.loads(out.read_text())
    assert record["completed"] == 8
    assert record["chat"]["later_turns"]["cached_tokens"] == 40
    assert record["chat"]["failures"] == {}
    server.failing = range(100)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--base_url", server.url, *flags])
    assert ended.value.code == 1
    assert "4 x status 503: no room" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--turns", value) for value in ("0", "3-2", "a", "2-")),
        *(("--think_s", value) for value in ("-1", "inf", "nan")),
        *(("--rate", "0"), ("--seconds", "0"), ("--seconds", "inf"), ("--num_conversations", "0")),
    ],
)
def test_a_value_that_cannot_be_is_refused(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", f"{flag}={value}"])
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


def test_the_script_runs_where_little_is_installed(server):
    """As beside another server: no pydantic, rich, uvloop or tokenizers, Penstock not installed."""
    missing = ("pydantic", "rich", "uvloop", "tokenizers", "torch", "starlette", "httpx", "typer")
    blocked = f"""
import runpy, sys
sys.path[:] = [one for one in sys.path if not one.endswith("/src")]
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one)]
for name in {missing!r}: sys.modules[name] = None
sys.argv = ["chat.py", *sys.argv[1:]]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    flags = ["--base_url", server.url, "--num_conversations", "3", "--max_answer_tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-c", blocked, *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Failed turns:                            0" in done.stdout
