"""Streamed events, put together by the `anthropic` package, against the message made whole."""

import itertools
import json
from typing import Any

import msgspec
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.server.anthropic.block_writer import BlockWriter
from penstock.server.anthropic.reply import Message, MessageStart, MessageUsage
from penstock.text.chat_format import ChatFormat
from penstock.types.outputs import TextDelta, ToolCallDelta
from penstock.types.request import FinishReason

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "find")]
WORDS = st.text(st.sampled_from('ab <>{}"\n€'), max_size=20)
CALLS = st.lists(
    st.tuples(st.sampled_from(("look", "find")), st.dictionaries(WORDS, WORDS, max_size=2)),
    max_size=3,
)
RAW_EVENT = TypeAdapter(RawMessageStreamEvent)


def deltas_of(text: str, cuts: list[int], finish: FinishReason) -> list[TextDelta]:
    parser = ChatFormat("think", "hermes").parser("", None, TOOLS)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parsed = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)] + [parser.flush()]
    finishes = [None] * (len(parsed) - 1) + [finish]
    return [
        TextDelta(
            index=0,
            text=one.text,
            reasoning=one.reasoning,
            tool_calls=one.tool_calls,
            finish=last,
        )
        for one, last in zip(parsed, finishes, strict=True)
    ]


def whole(deltas: list[TextDelta], **options: Any) -> list[Any]:
    writer = BlockWriter(**options)
    writer.push(
        TextDelta(
            index=0,
            text="".join(one.text for one in deltas),
            reasoning="".join(one.reasoning for one in deltas),
            tool_calls=tuple(call for one in deltas for call in one.tool_calls),
            finish=deltas[-1].finish,
        )
    )
    return msgspec.to_builtins(writer.blocks)


def streamed(deltas: list[TextDelta], **options: Any) -> list[Any]:
    writer = BlockWriter(**options)
    usage = MessageUsage(input_tokens=1, cache_read_input_tokens=0, output_tokens=0)
    events: list[msgspec.Struct] = [MessageStart(message=Message(id="m", model="m", usage=usage))]
    events += [event for delta in deltas for event in writer.push(delta)]
    snapshot, buffers = None, {}
    for event in events:
        raw = RAW_EVENT.validate_json(msgspec.json.encode(event))
        snapshot = accumulate_event(event=raw, current_snapshot=snapshot, json_bufs=buffers)
    together = [block.to_dict() for block in snapshot.content]
    assert len(together) == len(writer.blocks)
    return [{key: one[key] for key in one if key != "parsed_output"} for one in together]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    WORDS, WORDS, CALLS, st.lists(st.integers(0, 300), max_size=12), st.booleans(), st.booleans()
)
def test_events_put_together_are_the_whole_message_wherever_the_text_is_cut(
    reasoning, words, calls, cuts, is_cut, shows_thinking
):
    text = f"<think>{reasoning}</think>" if reasoning else ""
    text += words
    for name, arguments in calls:
        call = json.dumps({"name": name, "arguments": arguments})
        text += f"\n<tool_call>\n{call}\n</tool_call>"
    deltas = deltas_of(text, cuts, FinishReason.LENGTH if is_cut else FinishReason.STOP)
    options = {"shows_thinking": shows_thinking}
    blocks = streamed(deltas, **options)
    assert blocks == whole(deltas, **options)
    assert any(block["type"] == "thinking" for block in blocks) <= shows_thinking


def test_arguments_that_are_cut_or_broken_are_what_can_be_read_of_them():
    def blocks(arguments: str) -> list[Any]:
        call = ToolCallDelta(index=0, id="c", name="f", arguments=arguments)
        return whole([TextDelta(index=0, tool_calls=(call,), finish=FinishReason.LENGTH)])

    assert blocks('{"a": [1, 2')[0]["input"] == {"a": [1, 2]}
    assert blocks('{"a": 1, "b": "hal')[0]["input"] == {"a": 1}
    for broken in ("", "{a", "[1]", "null"):
        assert blocks(broken)[0]["input"] == {}


def test_an_output_of_nothing_is_an_empty_text():
    assert whole([TextDelta(index=0, finish=FinishReason.STOP)]) == [{"type": "text", "text": ""}]
    assert whole([TextDelta(index=0, finish=FinishReason.LENGTH)]) == []
