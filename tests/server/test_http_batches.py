"""`/v1/files` and `/v1/batches` by the `openai` package: a fake pipeline, then one real server."""

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from http_fakes import OUTPUT, FakePipeline, running_server
from msgspec.structs import replace
from server_process import Server
from waiting import until

from penstock.hub.folder import local_folder
from penstock.server.batches.endpoints import BATCH_PRIORITY
from penstock.server.batches.folder import FileLimits, FilesRoot
from penstock.types.pooling import Task

CHAT = "/v1/chat/completions"


def line(custom_id: str, prompt: str = "Hi", **body: object) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}]} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}) + "\n"


def client_of(running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)


def http_of(folder: Path, **settings: object) -> dict[str, object]:
    return {"http_config": {"files_dir": str(folder)} | settings}


def start(client: openai.OpenAI, text: str, **options: object):
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    options = {"endpoint": CHAT, "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: openai.OpenAI, batch_id: str):
    open_ones = ("validating", "in_progress", "finalizing", "cancelling")
    until(lambda: client.batches.retrieve(batch_id).status not in open_ones)
    return client.batches.retrieve(batch_id)


def rows(client: openai.OpenAI, file_id: str) -> dict[str, dict]:
    lines = client.files.content(file_id).text.splitlines()
    return {(row := json.loads(one))["custom_id"]: row for one in lines}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[openai.OpenAI]:
    with running_server(FakePipeline(), **http_of(tmp_path / "files")) as running:
        client = client_of(running)
        client.pipeline = running.pipeline  # type: ignore[attr-defined]
        yield client


def test_a_batch_from_upload_to_results(client, tmp_path):
    text = line("a") + line("b", max_tokens=3) + line("bad", temperature=-1)
    batch = start(client, text, metadata={"of": "tests"})
    assert batch.status == "validating" and batch.expires_at == batch.created_at + 86400
    done = ended(client, batch.id)
    assert done.status == "completed" and done.metadata == {"of": "tests"}
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    results = rows(client, done.output_file_id)
    assert results["a"]["response"]["body"]["choices"][0]["message"]["content"] == OUTPUT
    assert results["b"]["response"]["body"]["usage"]["completion_tokens"] == 3
    [failed] = rows(client, done.error_file_id).values()
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert {one.id for one in client.batches.list()} == {batch.id}
    asked = client.pipeline.asked
    assert [one.priority for one in asked] == [BATCH_PRIORITY, BATCH_PRIORITY]
    folders = [one for one in (tmp_path / "files").rglob("*") if one.is_dir()]
    assert folders and all(stat.S_IMODE(one.stat().st_mode) == 0o700 for one in folders)
    files = [one for one in (tmp_path / "files").rglob("*") if one.is_file()]
    assert files and all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in files)


def test_embeddings_come_in_batches_too(client):
    fake = client.pipeline.client
    fake.info = replace(fake.info, task=Task.EMBED, hidden_size=4)
    url = "/v1/embeddings"
    asked = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": ["A", "B"]}}
    done = ended(client, start(client, json.dumps(asked) + "\n", endpoint=url).id)
    [row] = rows(client, done.output_file_id).values()
    vectors = [one["embedding"] for one in row["response"]["body"]["data"]]
    assert vectors == [pytest.approx([0.6, 0.8, 0, 0])] * 2


def test_files_are_listed_in_pages_and_deleted(client):
    made = [client.files.create(file=(f"{i}.jsonl", b"x" * i), purpose="batch") for i in (1, 2, 3)]
    assert [one.bytes for one in made] == [1, 2, 3] and made[0].filename == "1.jsonl"
    assert {one.id for one in client.files.list()} == {one.id for one in made}
    page = client.files.list(limit=2)
    assert len(page.data) == 2 and page.has_next_page()
    assert len(list(page)) == 3  # all pages
    assert client.files.retrieve(made[2].id).bytes == 3
    assert client.files.content(made[2].id).read() == b"xxx"
    assert client.files.delete(made[2].id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made[2].id)


@pytest.mark.parametrize("bad", ["..", "file-" + "0" * 31 + "/", "%2e%2e%2fleader.lock", "x"])
def test_an_id_is_never_a_path(client, bad):
    client.files.create(file=("a.jsonl", b"x"), purpose="batch")
    url = str(client.base_url).rstrip("/")
    assert httpx.get(f"{url}/files/{bad}/content").status_code == 404
    assert httpx.get(f"{url}/batches/{bad}").status_code == 404


def test_an_input_with_errors_fails_with_their_lines(client):
    other = json.loads(line("c")) | {"url": "/v1/completions"}
    text = line("a") + "no json\n" + line("a") + json.dumps(other)
    done = ended(client, start(client, text).id)
    assert done.status == "failed" and done.output_file_id is None
    assert [one.line for one in done.errors.data] == [2, 3, 4]
    codes = [one.code for one in done.errors.data]
    assert codes == ["invalid_json", "duplicate_custom_id", "invalid_url"]
    assert client.pipeline.asked == []


def test_a_batch_is_cancelled_and_keeps_what_is_done(client):
    text = line("quick") + "".join(line(f"r{i}", "SLOW") for i in range(100))
    batch = start(client, text)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1)
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at >= done.cancelling_at
    assert set(rows(client, done.output_file_id)) == {"quick"} and done.error_file_id is None
    until(lambda: client.pipeline.num_open == 0)
    assert client.batches.cancel(batch.id).status == "cancelled"
    assert client.files.delete(batch.input_file_id).deleted


def test_no_more_run_at_once_than_allowed(tmp_path):
    pipeline = FakePipeline()
    http = http_of(tmp_path, max_batch_concurrency=3)
    with running_server(pipeline, **http) as running:
        client, may_go = client_of(running), threading.Event()
        pipeline.is_held = lambda: not may_go.is_set()
        one = start(client, "".join(line(f"r{i}", "HELD", max_tokens=4) for i in range(8)))
        two = start(client, "".join(line(f"r{i}", "HELD", max_tokens=4) for i in range(8)))
        until(lambda: pipeline.num_open == 3)
        may_go.set()
        assert [ended(client, batch.id).status for batch in (one, two)] == ["completed"] * 2
    assert pipeline.max_open == 3 and len(pipeline.asked) == 16


def test_a_full_server_is_waited_for(tmp_path):
    """429 is no result: the request is sent again."""

    class Full(FakePipeline):
        async def generate(self, given, *args):
            if len(self.asked) < 3:
                self.asked.append(given)
                raise openai_capacity()
            return await super().generate(given, *args)

    def openai_capacity():
        from penstock.errors import CapacityError

        return CapacityError("full", retry_after_s=1)

    with running_server(Full(), **http_of(tmp_path)) as running:
        client = client_of(running)
        done = ended(client, start(client, line("a")).id)
        assert done.request_counts.completed == 1 and done.error_file_id is None


def test_bounds_are_told_with_the_way_out(tmp_path):
    settings = http_of(tmp_path, max_file_bytes=1000, max_files=2, max_stored_bytes=1200)
    with running_server(FakePipeline(), **settings) as running:
        client = client_of(running)
        for size in (1001, 200_000):
            with pytest.raises(openai.APIStatusError, match="max_file_bytes") as caught:
                client.files.create(file=("a", b"x" * size), purpose="batch")
            assert caught.value.status_code == 413
        client.files.create(file=("a", b"x" * 1000), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max_stored_bytes"):
            client.files.create(file=("a", b"x" * 300), purpose="batch")
        client.files.create(file=("a", b"x" * 100), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="max_files"):
            client.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a", b"x"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            after = {"anchor": "created_at", "seconds": 3600}
            client.files.create(file=("a", b"x"), purpose="batch", expires_after=after)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"no form at all"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
    ],
)
def test_what_is_no_form_is_refused(client, content_type, body):
    url, headers = f"{client.base_url}files", {"content-type": content_type}
    assert httpx.post(url, content=body, headers=headers).status_code == 400


def test_files_may_be_turned_off(tmp_path):
    settings = http_of(tmp_path / "files", max_file_bytes=0)
    with (
        running_server(FakePipeline(), **settings) as running,
        pytest.raises(openai.NotFoundError, match="max_file_bytes is 0"),
    ):
        client_of(running).files.list()
    assert not (tmp_path / "files").exists()


def test_a_folder_that_others_may_read_is_not_used(tmp_path):
    with running_server(FakePipeline(), **http_of(tmp_path)) as running:
        client = client_of(running)
        file = client.files.create(file=("a.jsonl", b"x"), purpose="batch")
        [root] = tmp_path.iterdir()
        root.chmod(0o755)
        with pytest.raises(openai.BadRequestError, match="others may read it"):
            client.files.create(file=("a.jsonl", b"x"), purpose="batch")
        root.chmod(0o700)
        assert client.files.retrieve(file.id).id == file.id


def test_a_key_sees_its_own_files_and_batches_only(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: sk-alice-0123456789\nbob: sk-bob-0123456789ab\n")
    keys.chmod(0o600)
    settings = http_of(tmp_path / "files") | {"access_config": {"api_keys_file": str(keys)}}
    with running_server(FakePipeline(), **settings) as running:
        alice, bob = (
            client_of(running, key) for key in ("sk-alice-0123456789", "sk-bob-0123456789ab")
        )
        batch = ended(alice, start(alice, line("a")).id)
        assert running.pipeline.asked[0].tenant.name == "alice"
        assert list(bob.files.list()) == [] == list(bob.batches.list())
        for ask in (bob.files.content, bob.files.delete, bob.files.retrieve):
            with pytest.raises(openai.NotFoundError):
                ask(batch.output_file_id)
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )


def test_one_process_runs_batches_and_another_takes_over(tmp_path):
    limits = FileLimits(1, 1, 1)
    first, second = FilesRoot(tmp_path / "r", limits), FilesRoot(tmp_path / "r", limits)
    assert not first.take_leader_lock()  # nothing was ever kept there
    (tmp_path / "r").mkdir(mode=0o700)
    assert first.take_leader_lock() and first.take_leader_lock()
    assert not second.take_leader_lock()
    first.close()
    assert second.take_leader_lock()
    second.close()


def test_a_real_server_goes_on_with_a_batch_after_a_restart(tmp_path):
    """Two API servers of one engine, killed in the middle by a signal, and started again."""
    model = local_folder("tiny")
    settings = {**http_of(tmp_path / "files"), "num_postprocess_workers": 2, "max_batch_size": 2}
    settings["served_model_name"] = "tiny"
    prompts = [f"What is {i} + 30?" for i in range(40)]
    text = "".join(
        line(f"r{i}", one, max_tokens=40, ignore_eos=True) for i, one in enumerate(prompts)
    )
    with Server(model, **settings) as server:
        client = client_of(server)
        batch = start(client, text)
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        assert server.stop() == 0
    [output] = (tmp_path / "files").rglob("output.jsonl")
    before = output.read_text().splitlines()
    assert 0 < len(before) < 40 and all(json.loads(one) for one in before)
    with Server(model, **settings) as server:
        client = client_of(server)
        done = ended(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 40
        results = client.files.content(done.output_file_id).text.splitlines()
        assert results[: len(before)] == before and len(results) == 40
        assert "HTTP Request" not in server.log.read_text()  # a line of httpx for each
        assert {json.loads(one)["custom_id"] for one in results} == {f"r{i}" for i in range(40)}
