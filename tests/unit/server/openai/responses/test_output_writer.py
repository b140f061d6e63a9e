"""Streamed events, put together by rules of the API alone, against the output made whole."""

import itertools
import json
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.openai.responses.output_writer import OutputWriter
from penstock.server.sse import named_event
from penstock.text.chat_format import ChatFormat
from penstock.types.outputs import TextDelta, ToolCallDelta
from penstock.types.request import FinishReason

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "find")]
WORDS = st.text(st.sampled_from('ab <>{}"\n€'), max_size=20)
CALLS = st.lists(
    st.tuples(st.sampled_from(("look", "find")), st.dictionaries(WORDS, WORDS, max_size=2)),
    max_size=3,
)
CUTS = st.lists(st.integers(0, 300), max_size=12)


def model_text(reasoning: str, words: str, calls: list[tuple[str, dict[str, str]]]) -> str:
    text = f"<think>{reasoning}</think>" if reasoning else ""
    text += words
    for name, arguments in calls:
        call = json.dumps({"name": name, "arguments": arguments})
        text += f"\n<tool_call>\n{call}\n</tool_call>"
    return text


def deltas_of(text: str, cuts: list[int], finish: FinishReason) -> list[TextDelta]:
    parser = ChatFormat("think", "hermes").parser("", None, TOOLS)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parsed = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)]
    last = parser.flush()
    return [
        TextDelta(index=0, text=one.text, reasoning=one.reasoning, tool_calls=one.tool_calls)
        for one in parsed
    ] + [
        TextDelta(
            index=0,
            text=last.text,
            reasoning=last.reasoning,
            tool_calls=last.tool_calls,
            finish=finish,
        )
    ]


def whole(deltas: list[TextDelta]) -> list[Any]:
    writer = OutputWriter()
    writer.push(
        TextDelta(
            index=0,
            text="".join(one.text for one in deltas),
            reasoning="".join(one.reasoning for one in deltas),
            tool_calls=tuple(call for one in deltas for call in one.tool_calls),
            finish=deltas[-1].finish,
        )
    )
    return [plain(item) for item in msgspec.to_builtins(writer.items)]


def plain(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client has that believes nothing but deltas; checks what it is told besides."""
    items: list[dict[str, Any]] = []
    done: list[bool] = []
    for event in events:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert place == len(items) and all(done), "one item after the other"
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            done.append(False)
            continue
        item = items[place]
        assert place == len(items) - 1 and not done[place]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert event["delta"]
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                assert event["delta"]
                item["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][event["content_index"]]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "content_part.done":
                assert event["part"] == item["content"][event["content_index"]]
            case "output_item.done":
                assert event["item"] == item | {"status": event["item"]["status"]}
                item["status"] = event["item"]["status"]
                done[place] = True
            case _:
                raise AssertionError(event)
    assert all(done)
    return [plain(item) for item in items]


def streamed(deltas: list[TextDelta]) -> list[dict[str, Any]]:
    writer = OutputWriter()
    events = []
    for delta in deltas:
        data = b"".join(map(named_event, writer.push(delta))).decode()
        for one in data.split("\n\n")[:-1]:
            name, body = one.split("\n", 1)
            events.append(json.loads(body.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    together = put_together(events)
    assert together == [plain(item) for item in msgspec.to_builtins(writer.items)]
    return together


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(WORDS, WORDS, CALLS, CUTS, st.sampled_from((FinishReason.STOP, FinishReason.LENGTH)))
def test_events_put_together_are_the_whole_output_wherever_the_text_is_cut(
    reasoning, words, calls, cuts, finish
):
    deltas = deltas_of(model_text(reasoning, words, calls), cuts, finish)
    assert streamed(deltas) == whole(deltas)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.sampled_from("<>think/_cal{}[]\"': ab\n"), max_size=60), CUTS)
def test_whatever_a_model_writes_nothing_of_it_is_lost(text, cuts):
    deltas = deltas_of(text, cuts, FinishReason.STOP)
    items = streamed(deltas)
    for kind, said in (
        ("message", "".join(one.text for one in deltas)),
        ("reasoning", "".join(one.reasoning for one in deltas)),
    ):
        told = [item["content"][0]["text"] for item in items if item["type"] == kind]
        assert "".join(told) == said
    num_calls = len({call.index for one in deltas for call in one.tool_calls})
    assert sum(item["type"] == "function_call" for item in items) == num_calls


def test_text_that_comes_with_the_end_of_a_call_is_told_behind_it():
    deltas = [
        TextDelta(index=0, tool_calls=(ToolCallDelta(index=0, id="c", name="f", arguments="{"),)),
        TextDelta(
            index=0,
            text="done",
            tool_calls=(
                ToolCallDelta(index=0, arguments="}"),
                ToolCallDelta(index=1, id="d", name="g", arguments="{}"),
            ),
            finish=FinishReason.STOP,
        ),
    ]
    first, words, second = streamed(deltas)
    assert (first["arguments"], second["arguments"]) == ("{}", "{}")
    assert words["content"][0]["text"] == "done"


def test_an_output_of_nothing_is_a_message_of_no_words_and_one_cut_off_is_no_message():
    [message] = streamed([TextDelta(index=0, finish=FinishReason.STOP)])
    assert message["type"] == "message" and message["content"][0]["text"] == ""
    [reasoning] = streamed([TextDelta(index=0, reasoning="so", finish=FinishReason.LENGTH)])
    assert reasoning["type"] == "reasoning" and reasoning["status"] == "incomplete"
