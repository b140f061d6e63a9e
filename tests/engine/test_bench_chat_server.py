"""`penstock bench chat` against a real server: prefixes of conversations are found again."""

import json

import pytest
from server_process import Server

from penstock.cli.main import main

LOAD = ["--num_conversations", "6", "--turns", "2-3", "--max_concurrency", "3", "--disable_tqdm"]
LENGTHS = ["--system_tokens", "24", "--max_user_tokens", "8", "--max_answer_tokens", "8"]


@pytest.fixture(scope="module")
def server():
    with Server("tiny", num_threads=1, kv_cache_config={"max_tokens": 16384}) as server:
        yield server


def measured(server, tmp_path, *flags):
    path = tmp_path / "chat.json"
    address = ["--port", str(server.port), "--result_json", str(path)]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", *address, *LOAD, *LENGTHS, *flags])
    assert ended.value.code == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--backend", "openai", "--seed", "1"),
    ],
    ids=["chat", "text"],
)
def test_every_turn_is_answered_and_later_ones_reuse_what_was_said(server, tmp_path, flags, capsys):
    before = server.counters()
    record = measured(server, tmp_path, *flags)
    said = capsys.readouterr()
    chat = record["chat"]
    assert (chat["failed_turns"], chat["turns_not_sent"], chat["failures"]) == (0, 0, {})
    assert chat["conversations"] == chat["first_turns"]["completed"] == 6
    assert 6 <= chat["later_turns"]["completed"] <= 12
    later, first = chat["later_turns"], chat["first_turns"]
    assert later["cached_tokens"] > 0
    assert later["cached_share"] > 0.5
    hits = server.counters()["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    # A client is told of whole blocks; three requests at most went ahead.
    untold = hits - later["cached_tokens"] - first["cached_tokens"]
    assert 0 <= untold < 32 * (record["completed"] + 3)
    assert record["total_output_tokens"] >= 4 * record["completed"]
    assert "no cached tokens" not in said.err
    assert f"Successful turns:                        {record['completed']}" in said.out


def test_with_ids_the_answers_are_reused_to_the_last_whole_block(server, tmp_path):
    lengths = tmp_path / "lengths.jsonl"
    turn = {"conversation": 1, "prompt_tokens": 8, "output_tokens": 40}
    lengths.write_text(3 * f"{json.dumps(turn)}\n")
    ids = ["--backend", "openai", "--random_ids", "--vocab_size", "200", "--seed", "3"]
    record = measured(
        server, tmp_path, *ids, "--lengths", str(lengths), "--max_answer_tokens", "64"
    )
    chat = record["chat"]
    assert chat["returns_ids"]
    assert record["total_output_tokens"] == 6 * 3 * 40
    assert chat["first_turns"]["total_input_tokens"] == 6 * (24 + 8)
    assert chat["later_turns"]["total_input_tokens"] == 6 * (80 + 128)
    # In blocks of 32, of the 72 and 120 tokens said before; without the answers it would be 32.
    assert chat["later_turns"]["cached_tokens"] == 6 * (64 + 96)
