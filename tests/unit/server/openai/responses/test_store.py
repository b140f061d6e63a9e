"""Stored responses on disk: bounds, tenants, and what processes see of each other's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException

from penstock.errors import RequestError
from penstock.server.openai.responses.records import (
    MessageItem,
    OutputText,
    ReasoningEcho,
    ResponseObject,
    StoredResponse,
    TextEcho,
    new_id,
)
from penstock.server.openai.responses.store import ResponseStore, TenantResponses

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}


def record(size: int = 0, **changes: Any) -> StoredResponse:
    fields = {"status": "completed", "background": False} | changes
    runner = fields.pop("runner", "")
    response = ResponseObject(
        id=new_id("resp"),
        created_at=1,
        model="m",
        output=[MessageItem(id="msg_1", status="completed", content=[OutputText(text="a" * size)])],
        reasoning=ReasoningEcho(),
        store=True,
        temperature=1.0,
        text=TextEcho(format={"type": "text"}),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        metadata={},
        **fields,
    )
    return StoredResponse(response=response, input=[USER], runner=runner)


def is_there(stored: TenantResponses, response_id: str) -> bool:
    try:
        stored.load(response_id)
    except HTTPException as error:
        assert error.status_code == 404
        return False
    return True


def test_what_was_stored_is_found_by_every_store_of_the_folder_and_by_its_tenant_alone(tmp_path):
    one, other = (ResponseStore(tmp_path / "r", 10, 1 << 20) for _ in range(2))
    kept = record()
    assert one.of_tenant("alice").save(kept)
    assert other.of_tenant("alice").load(kept.response.id) == kept
    assert not is_there(other.of_tenant("bob"), kept.response.id)
    assert other.of_tenant("alice").history(kept.response.id)[0] == USER
    other.of_tenant("alice").delete(kept.response.id)
    assert not is_there(one.of_tenant("alice"), kept.response.id)


def test_nobody_else_may_read_it(tmp_path):
    store = ResponseStore(tmp_path / "r", 10, 1 << 20)
    store.of_tenant("a").save(record())
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "r").rglob("*")}
    assert modes == {0}


@pytest.mark.parametrize("name", ["../x", "resp_" + "0" * 31 + "/", "", "resp_" + "g" * 32])
def test_an_id_is_no_path(tmp_path, name):
    assert not is_there(ResponseStore(tmp_path, 10, 1 << 20).of_tenant("a"), name)


def test_the_oldest_make_room(tmp_path):
    store = ResponseStore(tmp_path, 16, 1 << 20)
    stored = store.of_tenant("a")
    kept = [record() for _ in range(40)]
    for one in kept:
        assert stored.save(one)
    num_files = len(list(tmp_path.rglob("*.json")))
    assert 12 <= num_files <= 16
    assert is_there(stored, kept[-1].response.id) and not is_there(stored, kept[0].response.id)

    large = ResponseStore(tmp_path / "bytes", 1000, 100_000).of_tenant("a")
    for _ in range(20):
        large.save(record(size=20_000))
    assert sum(path.stat().st_size for path in (tmp_path / "bytes").rglob("*.json")) <= 100_000
    assert not large.save(record(size=200_000)), "larger than all may be"


def test_a_response_that_did_not_end_by_itself_is_not_continued(tmp_path):
    stored = ResponseStore(tmp_path, 10, 1 << 20).of_tenant("a")
    failed = record(status="failed")
    stored.save(failed)
    with pytest.raises(RequestError, match="is failed"):
        stored.history(failed.response.id)


def test_one_that_runs_is_seen_cancelled_by_all_and_stays_deleted(tmp_path):
    one, other = (ResponseStore(tmp_path, 10, 1 << 20) for _ in range(2))
    running = record(status="in_progress", background=True, runner=one.runner)
    response_id = running.response.id
    one.of_tenant("a").save(running)
    assert other.of_tenant("a").load(response_id).response.status == "in_progress"
    other.of_tenant("a").cancel(response_id)
    assert one.of_tenant("a").is_cancelled(response_id)
    assert other.of_tenant("a").load(response_id).response.status == "cancelled"
    ended = msgspec.structs.replace(running.response, status="completed", completed_at=9)
    one.of_tenant("a").finish(msgspec.structs.replace(running, response=ended))
    assert other.of_tenant("a").load(response_id).response.status == "cancelled"

    one.of_tenant("a").save(running)
    other.of_tenant("a").delete(response_id)
    one.of_tenant("a").finish(running)
    assert not is_there(one.of_tenant("a"), response_id)
    assert not list(tmp_path.rglob("*.cancel"))


def test_one_whose_process_has_died_has_failed(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from penstock.server.openai.responses.store import ResponseStore\n"
        "print(ResponseStore(Path(sys.argv[1]), 10, 1 << 20).runner, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        runner = process.stdout.readline().strip()
        stored = ResponseStore(tmp_path, 10, 1 << 20).of_tenant("a")
        running = record(status="in_progress", background=True, runner=runner)
        stored.save(running)
        assert stored.load(running.response.id).response.status == "in_progress"
        process.kill()
        process.wait()
        failed = stored.load(running.response.id).response
    assert failed.status == "failed" and failed.error.code == "server_error"


def test_a_store_of_its_own_goes_with_it():
    store = ResponseStore(None, 10, 1 << 20)
    store.of_tenant("a").save(record())
    folder = store.folder
    assert folder.is_dir()
    store.close()
    assert not Path(folder).exists()
