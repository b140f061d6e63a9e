"""Turns chats into prompt text, in ChatML or harmony, with the parts to learn marked.

The Jinja templates are what a sibling ships; `segments` writes the same text (a test compares
them) and knows which of it the model is to say itself. Knows no tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corpus import Answer, Example, Message

CHATML_TEMPLATE = r"""
{%- set ns = namespace(system='', last_user=-1) -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if tools -%}
  {%- set ns.system = ns.system ~ ('\n\n' if ns.system else '')
      ~ '# Tools\nFunctions you can call:\n<tools>' -%}
  {%- for tool in tools -%}{%- set ns.system = ns.system ~ '\n' ~ (tool | tojson) -%}{%- endfor -%}
  {%- set ns.system = ns.system ~ '\n</tools>\nCall one with its name and arguments as JSON'
      ~ ' inside <tool_call></tool_call>.' -%}
{%- endif -%}
{%- if enable_thinking is defined and enable_thinking -%}
  {%- set ns.system = ns.system ~ ('\n\n' if ns.system else '') ~ '/think' -%}
{%- endif -%}
{%- if ns.system -%}{{- '<|im_start|>system\n' ~ ns.system ~ '<|im_end|>\n' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' ~ message.content
        ~ '\n</tool_response><|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- if '</think>' in content -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > ns.last_user and message.reasoning_content is string -%}
      {{- '<think>\n' ~ message.reasoning_content ~ '\n</think>\n\n' -}}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set arguments = call.function.arguments -%}
      {{- ('\n' if content or not loop.first else '') ~ '<tool_call>\n{"name": "'
          ~ call.function.name ~ '", "arguments": '
          ~ (arguments if arguments is string else arguments | tojson) ~ '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
""".strip()

HARMONY_TEMPLATE = r"""
{%- set ns = namespace(developer='', last_user=-1, tool='') -%}
{{- '<|start|>system<|message|>You are Penny, a tiny model.\nReasoning: '
    ~ (reasoning_effort if reasoning_effort is defined and reasoning_effort else 'low')
    ~ '\n\n# Valid channels: analysis, commentary, final.<|end|>' -}}
{%- if messages[0].role in ['system', 'developer'] -%}
  {%- set ns.developer = '# Instructions\n\n' ~ messages[0].content -%}
{%- endif -%}
{%- if tools -%}
  {%- set ns.developer = ns.developer ~ ('\n\n' if ns.developer else '')
      ~ '# Tools\n\n## functions\n\nnamespace functions {' -%}
  {%- for tool in tools -%}
    {%- set function = tool.function -%}
    {%- set ns.developer = ns.developer ~ '\n\n// ' ~ function.description ~ '\ntype '
        ~ function.name ~ ' = (_: {' -%}
    {%- for key, value in function.parameters.properties.items() -%}
      {%- set ns.developer = ns.developer ~ '\n' ~ key ~ ': '
          ~ ('number' if value.type == 'integer' else value.type) ~ ',' -%}
    {%- endfor -%}
    {%- set ns.developer = ns.developer ~ '\n}) => any;' -%}
  {%- endfor -%}
  {%- set ns.developer = ns.developer ~ '\n\n} // namespace functions' -%}
{%- endif -%}
{%- if ns.developer -%}
  {{- '<|start|>developer<|message|>' ~ ns.developer ~ '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|start|>user<|message|>' ~ message.content ~ '<|end|>' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|start|>functions.' ~ (message.name or ns.tool)
        ~ ' to=assistant<|channel|>commentary<|message|>' ~ message.content ~ '<|end|>' -}}
  {%- elif message.role == 'assistant' -%}
    {%- if loop.index0 > ns.last_user and message.reasoning_content -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ message.reasoning_content
          ~ '<|end|>' -}}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set arguments = call.function.arguments -%}
      {%- set ns.tool = call.function.name -%}
      {{- '<|start|>assistant<|channel|>commentary to=functions.' ~ ns.tool
          ~ ' <|constrain|>json<|message|>'
          ~ (arguments if arguments is string else arguments | tojson) ~ '<|call|>' -}}
    {%- endfor -%}
    {%- if not message.tool_calls -%}
      {{- '<|start|>assistant<|channel|>final<|message|>' ~ message.content
          ~ ('<|return|>' if loop.last else '<|end|>') -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
""".strip()

TEMPLATES = {"chatml": CHATML_TEMPLATE, "harmony": HARMONY_TEMPLATE}


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    is_learned: bool


def template_options(format: str, thinking: bool | None) -> dict[str, Any]:
    """The arguments of the chat template that ask for an example's thinking."""
    if format == "harmony":
        return {"reasoning_effort": "high" if thinking else "low"}
    return {} if thinking is None else {"enable_thinking": thinking}


def segments(format: str, example: Example) -> list[Segment]:
    """The whole chat as text, cut where what the model says itself begins and ends."""
    write = _harmony if format == "harmony" else _chatml
    return write(example.messages, example.tools, example.thinking)


def prompt(format: str, example: Example) -> str:
    """The chat up to its last answer, as the template writes it before a generation."""
    parts = segments(format, example)
    last = max(i for i, part in enumerate(parts) if not part.is_learned and _opens(format, part))
    return "".join(part.text for part in parts[: last + 1])


def _opens(format: str, part: Segment) -> bool:
    """Whether an unlearned part ends with the header of an assistant turn."""
    headers = ("<|start|>assistant",) if format == "harmony" else ("assistant\n", "</think>\n\n")
    return part.text.endswith(headers)


def _chatml(
    messages: Sequence[Message], tools: Sequence[Message], thinking: bool | None
) -> list[Segment]:
    parts = [m["content"] for m in messages[:1] if m["role"] == "system"]
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(
            f"# Tools\nFunctions you can call:\n<tools>{listed}\n</tools>\n"
            "Call one with its name and arguments as JSON inside <tool_call></tool_call>."
        )
    if thinking:
        parts.append("/think")
    heard = "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n" if parts else ""
    written: list[Segment] = []
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user":
            heard += f"<|im_start|>user\n{content}<|im_end|>\n"
        elif message["role"] == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            heard += f"<|im_start|>user\n{response}<|im_end|>\n"
        elif message["role"] == "assistant":
            heard += "<|im_start|>assistant\n"
            is_last = i == len(messages) - 1
            said = content
            if is_last and thinking is False:
                heard += "<think>\n\n</think>\n\n"
            if is_last and "reasoning_content" in message:
                said = f"<think>\n{message['reasoning_content']}\n</think>\n\n{content}"
            for call in message.get("tool_calls", ()):
                function = json.dumps(call["function"], ensure_ascii=False)
                said += f"<tool_call>\n{function}\n</tool_call>"
            written += [Segment(heard, False), Segment(said + "<|im_end|>", True)]
            heard = "\n"
    return [*written, Segment(heard, False)]


def _harmony(
    messages: Sequence[Message], tools: Sequence[Message], thinking: bool | None
) -> list[Segment]:
    heard = (
        f"<|start|>system<|message|>You are Penny, a tiny model.\nReasoning: "
        f"{'high' if thinking else 'low'}\n\n# Valid channels: analysis, commentary, final.<|end|>"
    )
    parts = [f"# Instructions\n\n{m['content']}" for m in messages[:1] if m["role"] == "system"]
    if tools:
        declared = "".join(map(_harmony_function, (tool["function"] for tool in tools)))
        parts.append(
            "# Tools\n\n## functions\n\nnamespace functions {"
            + declared
            + "\n\n} // namespace functions"
        )
    if parts:
        heard += "<|start|>developer<|message|>" + "\n\n".join(parts) + "<|end|>"
    written: list[Segment] = []
    for i, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "user":
            heard += f"<|start|>user<|message|>{content}<|end|>"
        elif message["role"] == "tool":
            heard += f"<|start|>functions.{message['name']} to=assistant<|channel|>commentary"
            heard += f"<|message|>{content}<|end|>"
        elif message["role"] == "assistant":
            is_last = i == len(messages) - 1
            heard += "<|start|>assistant"
            said, closing = f"<|channel|>final<|message|>{content}", "<|return|>"
            if thought := is_last and message.get("reasoning_content"):
                analysis = f"<|channel|>analysis<|message|>{thought}<|end|>"
                said = f"{analysis}<|start|>assistant{said}"
            for call in message.get("tool_calls", ()):
                function, closing = call["function"], "<|call|>"
                said = f"<|channel|>commentary to=functions.{function['name']} <|constrain|>json"
                said += "<|message|>" + json.dumps(function["arguments"], ensure_ascii=False)
            if is_last or closing == "<|call|>":
                written += [Segment(heard, False), Segment(said + closing, True)]
                heard = ""
            else:  # an earlier answer is closed by <|end|>, which the model is not to say
                written += [Segment(heard, False), Segment(said, True)]
                heard = "<|end|>"
    return [*written, Segment(heard, False)] if heard else written


def _harmony_function(function: Message) -> str:
    kinds = {"integer": "number"}
    properties = function["parameters"]["properties"].items()
    fields = "".join(f"\n{key}: {kinds.get(v['type'], v['type'])}," for key, v in properties)
    return (
        f"\n\n// {function['description']}\ntype {function['name']} = (_: {{{fields}\n}}) => any;"
    )


_HARMONY_MESSAGE = re.compile(
    r"<\|channel\|>(analysis|commentary|final)(?: to=functions\.(\w+))?[^<]*"
    r"(?:<\|constrain\|>json)?<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|<\|call\|>|$)",
    re.DOTALL,
)


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_answer(format: str, generated: str) -> Answer:
    """What the model said, special tokens included, as an OpenAI client would see it."""
    if format == "chatml":
        text = generated.partition("<|im_end|>")[0]
        thought, closing, after = text.partition("</think>")
        if closing:
            text, thought = after, thought.partition("<think>")[2]
        calls = tuple(map(_parsed_call, _CALL.findall(text)))
        return Answer(_CALL.sub("", text).strip(), thought.strip() if closing else "", calls)
    said, thought, called = "", "", []
    for channel, function, content in _HARMONY_MESSAGE.findall(generated):
        if function:
            called.append(_parsed_call(f'{{"name": "{function}", "arguments": {content}}}'))
        elif channel == "analysis":
            thought += content
        else:
            said += content
    return Answer(said.strip(), thought.strip(), tuple(called))


def _parsed_call(text: str) -> Message:
    """The call as a dictionary; an unreadable one is the empty call, which no rule accepts."""
    try:
        call = json.loads(text)
    except ValueError:
        return {}
    return call if isinstance(call, dict) else {}


def skill_line(format: str, example: Example) -> str:
    """A held-out example as a line of skills.jsonl: what to send, and how to score the answer."""
    line: dict[str, Any] = {
        "skill": example.skill,
        "messages": [_openai(i, message) for i, message in enumerate(example.messages[:-1])],
    }
    if example.tools:
        line["tools"] = list(example.tools)
    if options := template_options(format, example.thinking):
        line["chat_template_kwargs"] = options
    return json.dumps(line | {"expected": example.expected, "match": example.match})


def _openai(i: int, message: Message) -> Message:
    """Our short message with what an OpenAI server asks for: call ids, arguments as text."""
    if "tool_calls" in message:
        calls = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": call["function"]
                | {"arguments": json.dumps(call["function"]["arguments"])},
            }
            for call in message["tool_calls"]
        ]
        return message | {"tool_calls": calls}
    if message["role"] == "tool":
        return message | {"tool_call_id": f"call_{i - 1}"}
    return message
