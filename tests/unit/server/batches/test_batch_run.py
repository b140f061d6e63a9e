"""One batch from any state to its end, with an application that stands for the endpoints."""

import asyncio
import io
import json
import time
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from penstock.errors import RequestError
from penstock.server.batches import run_lines
from penstock.server.batches.batch_run import MAX_INTERRUPTIONS, BatchHost, BatchRun
from penstock.server.batches.folder import (
    MAX_OPEN_BATCHES,
    FileLimits,
    FilesRoot,
    TenantFolder,
)
from penstock.server.batches.records import (
    BatchObject,
    BatchState,
    new_batch_id,
    result_file_id,
)
from penstock.types.tenant import ANONYMOUS

URL = "/v1/completions"


class Endpoints:
    """Answers with `statuses`, one after the other, then with 200; counts who asks."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.prompts: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        body = await Request(scope, receive).json()
        self.prompts.append(body["prompt"])
        status = self.statuses.pop(0) if self.statuses else 200
        await JSONResponse({"id": "cmpl-1", "said": body["prompt"]}, status)(scope, receive, send)


@pytest.fixture
def folder(tmp_path: Path) -> TenantFolder:
    return FilesRoot(tmp_path / "root", FileLimits(1 << 20, 10, 1 << 20)).of_tenant("anonymous")


def made(folder: TenantFolder, num_lines: int, **changes: object) -> BatchState:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": URL, "body": {"prompt": str(i)}}
        for i in range(num_lines)
    ]
    text = "\n".join(map(json.dumps, lines))
    file = folder.add_file(io.BytesIO(text.encode()), "in.jsonl", "batch")
    now = int(time.time())
    batch = BatchObject(
        id=new_batch_id(),
        endpoint=URL,
        input_file_id=file.id,
        completion_window="24h",
        created_at=now,
        expires_at=now + 86400,
    )
    state = BatchState(batch=batch, tenant="anonymous")
    folder.add_batch(state)
    for name, value in changes.items():
        setattr(state if hasattr(state, name) else batch, name, value)
    folder.save(state)
    return folder.batch(batch.id)


def run(
    folder: TenantFolder,
    state: BatchState,
    app: Endpoints,
    tenant=ANONYMOUS,
    is_leaving=lambda: False,
    is_engine_well=lambda: True,
) -> BatchState:
    host = BatchHost(app, 1 << 20, 1 << 20, lambda: 2, is_leaving, is_engine_well)

    async def one() -> None:
        await BatchRun(folder, state, tenant, host, asyncio.Semaphore(2)).run()

    asyncio.run(one())
    return folder.batch(state.batch.id)


def rows(folder: TenantFolder, file_id: str | None) -> dict[str, dict]:
    assert file_id is not None
    lines = folder.content_path(file_id).read_text().splitlines()
    return {(row := json.loads(line))["custom_id"]: row for line in lines}


def test_a_batch_that_expired_says_so_of_every_request_that_is_left(folder):
    state = made(folder, 3, expires_at=1)
    path = folder.batch_folder(state.batch.id) / "output.jsonl"
    path.write_text('{"custom_id": "r1", "response": {}}\n')
    after = run(folder, state, app := Endpoints()).batch
    assert after.status == "expired" and after.expired_at and app.prompts == []
    assert set(rows(folder, after.output_file_id)) == {"r1"}
    unsent = rows(folder, after.error_file_id)
    assert set(unsent) == {"r0", "r2"}
    assert unsent["r0"]["error"]["code"] == "batch_expired" and unsent["r0"]["response"] is None
    assert (after.request_counts.completed, after.request_counts.failed) == (1, 2)


def test_what_ended_in_the_middle_goes_on_but_not_for_ever(folder):
    state = made(folder, 2, is_running=True, num_interruptions=MAX_INTERRUPTIONS - 2)
    assert run(folder, state, Endpoints()).batch.status == "completed"
    state = made(folder, 2, is_running=True, num_interruptions=MAX_INTERRUPTIONS - 1)
    after = run(folder, state, app := Endpoints())
    assert after.batch.status == "failed" and app.prompts == []
    assert after.batch.errors.data[0].code == "interrupted"


@pytest.mark.parametrize("is_well", [True, False])
def test_a_server_that_leaves_keeps_the_batch_for_the_next(folder, is_well):
    state = made(folder, 9)
    app = Endpoints()
    after = run(
        folder,
        state,
        app,
        is_leaving=lambda: len(app.prompts) >= 3,
        is_engine_well=lambda: is_well,
    )
    assert after.batch.status == "in_progress" and 3 <= len(app.prompts) <= 4
    # Of an engine that died this batch may be the reason.
    assert after.is_running is (not is_well) and after.num_interruptions == 0
    done = run(folder, after, again := Endpoints())
    assert done.batch.status == "completed" and done.batch.request_counts.completed == 9
    assert sorted(app.prompts + again.prompts) == sorted(map(str, range(9)))


def test_requests_that_end_with_the_server_are_no_failures(folder):
    state = made(folder, 1)
    app = Endpoints(503)
    after = run(folder, state, app, is_leaving=lambda: len(app.prompts) > 0)
    assert after.batch.request_counts.failed == 0 and after.batch.is_open


def test_a_batch_that_ended_while_its_files_were_handed_over_sends_nothing_again(folder):
    state = made(folder, 2)
    done = run(folder, state, Endpoints()).batch
    state.is_running = True  # as it was before its last words
    state.batch.status = "in_progress"
    folder.save(state)
    again = run(folder, folder.batch(done.id), app := Endpoints()).batch
    assert again.status == "completed" and app.prompts == []
    assert again.output_file_id == done.output_file_id == result_file_id(done.id, "output")
    assert set(rows(folder, again.output_file_id)) == {"r0", "r1"}


def test_a_request_that_the_server_fails_on_again_and_again_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(run_lines, "_MAX_PAUSE_S", 0.01)
    state = made(folder, 1)
    after = run(folder, state, app := Endpoints(503, 429, 503, 503, 503)).batch
    assert len(app.prompts) == 5 and after.status == "completed"
    assert rows(folder, after.error_file_id)["r0"]["response"]["status_code"] == 503


def test_a_batch_without_its_key_or_input_fails_with_the_reason(folder):
    after = run(folder, made(folder, 1), Endpoints(), tenant=None).batch
    assert after.status == "failed" and after.errors.data[0].code == "no_such_key"
    state = made(folder, 1, input_file_id="file-" + "0" * 32)
    assert run(folder, state, Endpoints()).batch.errors.data[0].code == "no_such_file"


def test_old_batches_make_room_and_too_many_open_ones_are_refused(tmp_path):
    folder = FilesRoot(tmp_path / "root", FileLimits(1 << 20, 40, 1 << 20)).of_tenant("a")
    narrow = FilesRoot(tmp_path / "root", FileLimits(1 << 20, 2, 1 << 20)).of_tenant("a")
    ended = [run(folder, made(folder, 1, created_at=i), Endpoints()).batch.id for i in (1, 2, 3)]
    fresh = folder.batch(ended[0])
    fresh.batch.id, fresh.batch.status = new_batch_id(), "validating"
    narrow.add_batch(fresh)
    assert {one.batch.id for one in folder.batches()} == {ended[2], fresh.batch.id}
    for _ in range(MAX_OPEN_BATCHES - 1):
        fresh.batch.id = new_batch_id()
        folder.add_batch(fresh)
    fresh.batch.id = new_batch_id()
    with pytest.raises(RequestError, match="16 batches are not done"):
        folder.add_batch(fresh)


def test_a_file_that_is_not_whole_is_left_out(folder):
    whole, broken = made(folder, 1), made(folder, 1)
    (folder.batch_folder(broken.batch.id) / "state.json").write_bytes(b"")
    cut = folder.content_path(broken.batch.input_file_id).with_suffix(".json")
    cut.write_bytes(b'{"id": "fi')
    assert [one.id for one in folder.files()] == [whole.batch.input_file_id]
    for ask, lost in ((folder.file, cut.stem), (folder.batch, broken.batch.id)):
        with pytest.raises(HTTPException) as caught:
            ask(lost)
        assert caught.value.status_code == 404
    assert [one.batch.id for one in folder.batches()] == [whole.batch.id]
    ended: set[str] = set()
    assert [one.batch.id for one in folder.open_batches(ended)] == [whole.batch.id]
    run(folder, whole, Endpoints())
    assert folder.open_batches(ended) == [] and ended == {whole.batch.id}
