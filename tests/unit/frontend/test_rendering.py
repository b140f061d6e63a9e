"""Chat templates of a hostile model: they cost a request, not the server."""

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from waiting import until

from penstock.errors import CapacityError, ConfigError, RequestError
from penstock.frontend import rendering
from penstock.frontend.rendering import InProcess, TemplateProcess, TemplateTexts
from penstock.text.chat import SIMPLE_TEMPLATE, ChatTemplate
from penstock.types.request import ChatOptions

MANY = 100_000
HI = [{"role": "user", "content": "hi"}]
SPIN = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# On the word "spin" only, so that it starts.
SOMETIMES = "{% if 'spin' in messages[0].content %}" + SPIN + "{% endif %}" + SIMPLE_TEMPLATE


@asynccontextmanager
async def started(template, **limits):
    process = TemplateProcess(TemplateTexts({"default": template}, {"bos_token": "<b>"}), **limits)
    await process.start()
    try:
        yield process
    finally:
        await process.aclose()


def user(text):
    return [{"role": "user", "content": text}]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid):
    until(lambda: not is_running(pid))


def test_a_process_renders_as_the_template_itself_does(run):
    template = "{{ bos_token }}{{ messages|tojson }}{{ tools }}{{ documents }}{{ x }}"
    options = ChatOptions(
        tools=({"type": "function", "function": {"name": "f", "parameters": {"n": 10**30}}},),
        documents=({"title": "ü\n"},),
        template_kwargs={"x": [1, 2.5, None, True, {"a": "\x00€😀"}]},
    )
    messages = [*user("Grüß <Gott> \\ \"'"), {"role": "assistant", "tool_calls": []}]

    async def both():
        async with started(template) as process:
            here = ChatTemplate({"default": template}, {"bos_token": "<b>"})
            expected = await InProcess(here).parts(messages, options, MANY)
            assert await process.parts(messages, options, MANY) == expected
            many = await asyncio.gather(
                *(process.parts(user(str(i)), options, MANY) for i in range(200))
            )
            assert [one[0].split('"content": "')[1].split('"')[0] for one in many] == [
                str(i) for i in range(200)
            ]

    run(both())


@pytest.mark.parametrize(
    ("messages", "options", "max_chars", "code", "said"),
    [
        ([], ChatOptions(), MANY, "invalid_value", "messages is empty"),
        (HI, ChatOptions(template_kwargs={"tools": 1}), MANY, "invalid_value", "may not set"),
        (user("x" * 2000), ChatOptions(), 1000, "context_length_exceeded", "more than 1000"),
        (user("\ud800"), ChatOptions(), MANY, "invalid_value", "half of a surrogate pair"),
        ([{"role": "user", "content": {1, 2j}}], ChatOptions(), MANY, "invalid_type", "JSON"),
    ],
)
def test_refusals_come_back_as_they_are(run, messages, options, max_chars, code, said):
    async def ask():
        async with started(SIMPLE_TEMPLATE) as process:
            with pytest.raises(RequestError, match=said) as caught:
                await process.parts(messages, options, max_chars)
            assert caught.value.code == code
            assert await process.parts(HI, ChatOptions(), MANY) == ["user: hi\nassistant:"]

    run(ask())


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("\n{% if %}", "chat template, line 2"),
        ("{{ 'a' * 3000000000 }}", "more than 1024 MiB of memory; name another one"),
        ("{% set x = 'a' * 3000000000 %}", "more than 1024 MiB of memory"),
        (SPIN, "took longer than 2 s while it was compiled; name another one"),
        ("{{ 9 ** 999999999 }}", "took longer than 2 s"),  # holds Python up, signals too
    ],
)
def test_a_template_that_cannot_be_compiled_within_limits_is_a_configuration_error(
    run, template, said
):
    async def start():
        # Those that end by themselves have time for it.
        limit_s = 2 if "longer" in said else 240
        texts = TemplateTexts({"default": template}, {})
        process = TemplateProcess(texts, load_deadline_s=limit_s)
        with pytest.raises(ConfigError, match=said):
            await process.start()
        assert process.pid is None

    run(start())


def test_a_request_that_spins_ends_at_its_deadline_and_the_others_are_rendered(run):
    async def ask():
        async with started(SOMETIMES, render_deadline_s=1.5) as process:
            first = process.pid
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            asked = [process.parts(user(t), ChatOptions(), MANY) for t in ("a", "spin", "b", "c")]
            a, spin, b, c = await asyncio.gather(*asked, return_exceptions=True)
            ticking.cancel()
            assert [a, b, c] == [[f"user: {t}\nassistant:"] for t in "abc"]
            assert isinstance(spin, RequestError) and spin.code == "chat_template_failed"
            assert "took longer than 1.5 s" in spin.message
            assert ticks > 3, "the event loop went on meanwhile"
            assert process.pid != first
            wait_until_gone(first)

    run(ask())


def test_a_process_that_dies_is_started_again(run):
    async def ask():
        async with started(SIMPLE_TEMPLATE) as process:
            for _ in range(2):
                os.kill(process.pid, 9)
                wait_until_gone(process.pid)
                # The one that meets the dead process may fail, and says so; never more than it.
                told = await asyncio.gather(
                    *(process.parts(HI, ChatOptions(), MANY) for _ in range(5)),
                    return_exceptions=True,
                )
                assert told[1:] == [["user: hi\nassistant:"]] * 4
                assert told[0] == told[1] or "broke the process" in str(told[0])

    run(ask())


def test_what_waits_is_bounded(run, monkeypatch):
    monkeypatch.setattr(rendering, "_MAX_JOBS", 3)

    async def ask():
        async with started(SOMETIMES, render_deadline_s=1.5) as process:
            asked = [process.parts(user("spin"), ChatOptions(), MANY)]
            asked += [process.parts(HI, ChatOptions(), MANY) for _ in range(4)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(one) for one in told] == [
                RequestError, list, list, CapacityError, CapacityError,
            ]  # fmt: skip

    run(ask())


def test_those_behind_one_that_spins_keep_their_order(run):
    async def ask():
        async with started(SOMETIMES, render_deadline_s=1.5) as process:
            done: list[str] = []

            async def one(text):
                await process.parts(user(text), ChatOptions(), MANY)
                done.append(text)

            await asyncio.gather(*map(one, ("spin", *"abcdef")), return_exceptions=True)
            assert done == list("abcdef")

    run(ask())


def test_bytes_that_wait_are_bounded_and_counted_until_they_are_rendered(run, monkeypatch):
    monkeypatch.setattr(rendering, "_MAX_BYTES", 10_000)

    async def ask():
        async with started(SIMPLE_TEMPLATE) as process:
            large = user("x" * 6_000)
            for _ in range(3):
                told = await asyncio.gather(
                    *(process.parts(large, ChatOptions(), MANY) for _ in range(2)),
                    return_exceptions=True,
                )
                assert [type(one) for one in told] == [list, CapacityError]

    run(ask())


CHILD = """
import asyncio, sys
from penstock.frontend.rendering import TemplateProcess, TemplateTexts
from penstock.types.request import ChatOptions

async def main():
    process = TemplateProcess(TemplateTexts({"default": sys.argv[1]}, {}), render_deadline_s=1)
    await process.start()
    asked = asyncio.create_task(
        process.parts([{"role": "user", "content": sys.argv[2]}], ChatOptions(), 1000)
    )
    await asyncio.sleep(0.2)
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (SOMETIMES, "idle"),
        (SOMETIMES, "spin"),
        ("{% if 'spin' in messages[0].content %}{{ 9 ** 999999999 }}{% endif %}", "spin"),
    ],
)
def test_the_process_leaves_when_its_parent_is_killed(template, word):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, template, word], stdout=subprocess.PIPE
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(pid)


def test_templates_of_requests_cost_their_own_request(run):
    """Nothing is started before the first one; the messages of the others are rendered."""

    async def ask():
        process = TemplateProcess(TemplateTexts({}, {"bos_token": "<b>"}), render_deadline_s=1.5)
        assert process.pid is None

        async def render(template):
            options = ChatOptions(template=template)
            try:
                return (await process.parts(HI, options, MANY))[0]
            except RequestError as error:
                return error.code, error.param

        try:
            templates = ["{{ bos_token }}1", SPIN, "{{ messages[0].content }}", "{% if %}", "{{ 1"]
            templates += ["{{ ''.__class__.__mro__ }}", "{% include '/etc/passwd' %}"]
            found = await asyncio.gather(*map(render, templates))
            assert found[0] == "<b>1"
            assert found[1] == ("chat_template_failed", "messages")
            assert found[2] == "hi"
            assert found[3] == found[4] == ("invalid_value", "chat_template")
            assert found[5] == found[6] == ("invalid_value", "messages")
            assert [await render(f"{i}") for i in range(40)] == [f"{i}" for i in range(40)]
        finally:
            await process.aclose()

    run(ask())
