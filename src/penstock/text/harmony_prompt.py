"""Writes prompts in harmony, the format of gpt-oss, from messages and tools as OpenAI has them.

Letter for letter what the format's reference library writes. The template that comes with gpt-oss
differs from it in the developer message, tool calls and tool results. Words of a message that look
like a special token stay words: `HarmonyTemplate.parts` cuts them in two.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import RequestError
from penstock.text.chat import check_options, check_room, check_size, plain_message
from penstock.text.harmony import FUNCTIONS
from penstock.types.request import ChatOptions

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_KNOWLEDGE_CUTOFF = "2024-06"
_EFFORTS = ("low", "medium", "high")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_LINE_END = re.compile(r"\r?\n")
_LOOKS_LIKE_MARK = re.compile(r"(?<=<\|)(?=\w+\|>)")


def is_gpt_oss(template: str) -> bool:
    """Whether a chat template is the one that comes with gpt-oss."""
    return "<|channel|>" in template and _IDENTITY in template and _KNOWLEDGE_CUTOFF in template


class HarmonyTemplate:
    def parts(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_chars: int
    ) -> list[str]:
        """The prompt, cut where tokens must not be looked for across the cut."""
        check_options(messages, options)
        check_room(options, ("tools",))
        plain = [plain_message(message, text_arguments=True) for message in messages]
        parts = [""]
        num_chars = 0
        for piece, is_said in _pieces(plain, options):
            num_chars += len(piece)
            check_size(num_chars, max_chars)
            head, *rest = _LOOKS_LIKE_MARK.split(piece) if is_said else [piece]
            parts[-1] += head
            parts += rest
        return parts

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_chars: int
    ) -> str:
        return "".join(self.parts(messages, options, max_chars))


Piece = tuple[str, bool]  # text, whether it is somebody's words


def _pieces(messages: Sequence[dict[str, Any]], options: ChatOptions) -> Iterator[Piece]:
    yield from _system(options)
    instructions: list[Piece] = []
    if messages[0]["role"] in ("system", "developer"):
        instructions, messages = _instructions(messages[0]), messages[1:]
    if tools := _tools(options.tools):
        instructions += [("\n\n" if instructions else "", False), (tools, True)]
    if instructions:
        yield from _message("developer", *instructions)

    finals = [i for i, one in enumerate(messages) if one["role"] == "assistant" and _is_final(one)]
    is_continued = options.continue_final_message
    last_final = finals[-1 - is_continued] if len(finals) > is_continued else -1
    names: dict[str | None, str] = {}
    for i, message in enumerate(messages):
        match message["role"]:
            case "system" | "developer":
                yield from _message("developer", *_instructions(message))
            case "assistant":
                is_end = is_continued and i == len(messages) - 1
                yield from _assistant(message, thinks=i > last_final, is_open=is_end)
                for call in message.get("tool_calls") or ():
                    names[call.get("id")] = names[None] = _function(call)["name"]
            case "tool" | "function":
                name = message.get("name") or names.get(message.get("tool_call_id"))
                yield from _tool_result(message, name or names.get(None))
            case role:
                yield from _message(role, (_content(message), True))
    if options.add_generation_prompt:
        yield "<|start|>assistant", False


def _message(header: str, *words: Piece, end: str = "<|end|>") -> Iterator[Piece]:
    yield f"<|start|>{header}<|message|>", False
    yield from words
    yield end, False


def _system(options: ChatOptions) -> Iterator[Piece]:
    kwargs = options.template_kwargs
    effort = kwargs.get("reasoning_effort") or "medium"
    if effort not in _EFFORTS:
        raise RequestError(
            "invalid_value",
            f"reasoning_effort is '{effort}', this model knows {', '.join(_EFFORTS)}",
            "reasoning_effort",
        )
    yield from _message(
        "system",
        (str(kwargs.get("model_identity") or _IDENTITY), True),
        (f"\nKnowledge cutoff: {_KNOWLEDGE_CUTOFF}\nCurrent date: {_today()}\n\n", False),
        (f"Reasoning: {effort}\n\n# Valid channels: analysis, commentary, final. ", False),
        ("Channel must be included for every message.", False),
        (_CALLS_GO_TO if options.tools else "", False),
    )


_CALLS_GO_TO = "\nCalls to these tools must go to the commentary channel: 'functions'."


def _today() -> str:
    return datetime.date.today().isoformat()


def _instructions(message: Mapping[str, Any]) -> list[Piece]:
    text = _content(message)
    return [("# Instructions\n\n", False), (text, True)] if text else []


def _assistant(message: Mapping[str, Any], thinks: bool, is_open: bool) -> Iterator[Piece]:
    """Reasoning, then the content, or what is said before tool calls and these."""
    reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key)), None)
    if thinks and isinstance(reasoning, str):
        yield from _message("assistant<|channel|>analysis", (reasoning, True))
    text, calls = _content(message), message.get("tool_calls") or ()
    if text or not calls:
        channel = "commentary" if calls else "final"
        end = "" if is_open else "<|end|>"
        yield from _message(f"assistant<|channel|>{channel}", (text, True), end=end)
    for call in calls:
        function = _function(call)
        yield "<|start|>assistant to=", False
        yield FUNCTIONS + function["name"], True
        yield "<|channel|>commentary <|constrain|>json<|message|>", False
        yield function["arguments"], True
        yield "<|call|>", False


def _tool_result(message: Mapping[str, Any], name: str | None) -> Iterator[Piece]:
    if name is None:
        raise RequestError(
            "invalid_value",
            "a message of role 'tool' answers a tool call, and none came before it",
            "messages",
        )
    yield "<|start|>", False
    yield FUNCTIONS + name.removeprefix(FUNCTIONS), True
    yield " to=assistant<|channel|>commentary<|message|>", False
    yield _content(message), True
    yield "<|end|>", False


def _is_final(message: Mapping[str, Any]) -> bool:
    return not message.get("tool_calls")


def _content(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "")


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError("invalid_value", "a tool call needs a function with a name", "messages")
    return {"name": name, "arguments": str(function.get("arguments", "{}"))}


# --- tools: JSON schema as the types of TypeScript ------------------------------------------------


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    if not tools:
        return ""
    try:
        declared = "".join(map(_declaration, tools))
    except RecursionError:
        raise RequestError(
            "invalid_value", "the parameters of a tool are nested too deeply", "tools"
        ) from None
    return (
        f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{declared}}} // namespace functions"
    )


def _declaration(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    description = str(function.get("description") or "")
    lines = _LINE_END.split(description.removesuffix("\n")) if description else []
    parameters = function.get("parameters")
    takes = f"_: {_type(parameters, '')}" if parameters else ""
    comment = "".join(f"// {line}\n" for line in lines)
    return f"{comment}type {function.get('name')} = ({takes}) => any;\n\n"


def _type(schema: Any, indent: str) -> str:
    match schema:
        case {"oneOf": [*variants]}:
            return "".join(
                f"\n{indent} | {_variant(one, indent, in_property=False)}" for one in variants
            )
        case {"type": [_, *_] as kinds}:
            return " | ".join("number" if kind == "integer" else str(kind) for kind in kinds)
        case {"type": "object"}:
            return _object(schema, indent)
        case {"type": "string", "enum": [*values]} if any(isinstance(one, str) for one in values):
            return " | ".join(f'"{value}"' for value in values if isinstance(value, str))
        case {"type": "array", "items": items}:
            return f"{_type(items, indent)}[]"
        case {"type": "array"}:
            return "Array<any>"
        case {"type": "string" | "boolean" as kind}:
            return str(kind)
        case {"type": "number" | "integer"}:
            return "number"
    return "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    comment = f"{indent}// {_text(schema, 'description')}\n" if _has(schema, "description") else ""
    properties = schema.get("properties")
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    lines = [
        _property(key, value, key in required, indent)
        for key, value in (properties if isinstance(properties, Mapping) else {}).items()
    ]
    return f"{comment}{{\n{''.join(lines)}{indent}}}"


def _property(key: str, schema: Any, is_required: bool, indent: str) -> str:
    schema = schema if isinstance(schema, Mapping) else {}
    titled = [f"// {_text(schema, 'title')}", "//"] if _has(schema, "title") else []
    described = [f"// {_text(schema, 'description')}"] if _has(schema, "description") else []
    examples = schema.get("examples")
    shown = ["// Examples:"] if isinstance(examples, list) and examples else []
    shown += [f'// - "{one}"' for one in examples if isinstance(one, str)] if shown else []
    default = [f"// {text}"] if (text := _default(schema)) else []
    name = f"{indent}{key}{'' if is_required else '?'}:"
    if isinstance(schema.get("oneOf"), list):
        # Below a description of all, that of the first variant and its repetitions are left out.
        first = schema["oneOf"][0] if schema["oneOf"] else None
        first_said = first.get("description") if isinstance(first, Mapping) else None
        hidden = (schema["description"], first_said) if described else ()
        comments = titled + shown + (described if len(set(hidden)) > 1 else []) + default
        variants = [
            f"{indent} | {_variant(one, indent, hidden if i == 0 else hidden[:1])}"
            for i, one in enumerate(schema["oneOf"])
        ]
        lines = [name, *variants, f"{indent},"]
    else:
        comments = titled + described + shown
        kind = _nullable(_type(schema, indent + "    "), schema)
        lines = [f"{name} {kind}," + "".join(f" {text}" for text in default)]
    above = [f"{indent}{text}" for text in comments]
    return "\n".join(above + lines) + "\n"


def _variant(schema: Any, indent: str, said: tuple[Any, ...] = (), in_property: bool = True) -> str:
    """One of several types; descriptions that are in `said` are not repeated."""
    schema = schema if isinstance(schema, Mapping) else {}
    comments = [_text(schema, "description")] if _has(schema, "description") else []
    comments = [one for one in comments if one not in said]
    comments += [default] if (default := _default(schema, in_property)) else []
    kind = _nullable(_type(schema, indent + "   "), schema)
    return f"{kind} // {' '.join(comments)}" if comments else kind


def _nullable(kind: str, schema: Mapping[str, Any]) -> str:
    return f"{kind} | null" if schema.get("nullable") is True and "null" not in kind else kind


def _default(schema: Mapping[str, Any], in_property: bool = True) -> str:
    if "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str) and not schema.get("enum"):
        return f'default: "{value}"'
    if isinstance(value, str) and in_property:
        return f"default: {value}"
    return "default: " + json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _has(schema: Mapping[str, Any], key: str) -> bool:
    return isinstance(schema.get(key), str)


def _text(schema: Mapping[str, Any], key: str) -> str:
    return str(schema[key])
