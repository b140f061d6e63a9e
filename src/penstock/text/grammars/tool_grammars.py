"""The formats in which models write tool calls, as rules: the arguments of each by its schema.

What a call looks like must be what its parser (`text/tools/formats`) reads.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import RequestError
from penstock.text.grammars.json_schema import ANY_OBJECT, schema_grammar
from penstock.text.grammars.rules import ANY_TEXT, Rules
from penstock.text.grammars.single_arguments import (
    ArgumentTags,
    python_arguments,
    tagged_arguments,
    unsupported,
)
from penstock.text.tools.formats import FORMATS

_NEW_LINE = '"\\n"?'


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    parameters: Mapping[str, Any] | None  # None: any object
    param: str
    rules: Rules

    @property
    def arguments(self) -> str:
        """What stands for them as one object of JSON."""
        parameters = self.parameters
        if parameters is not None:  # an object they are, whether it says so or not
            parameters = {"type": "object", **parameters}
        text = ANY_OBJECT if parameters is None else json.dumps(parameters)
        return self.rules.part(schema_grammar(text, self.param))


class ToolGrammar(NamedTuple):
    """`opening` begins the calls and can be found in free text; None: the message is the calls,
    and no other begins with `first`."""

    opening: str | None
    calls: Callable[[Rules, Sequence[Call], bool], str]  # after the opening; whether several
    first: str = "{"


def _one_of(alternatives: Sequence[str]) -> str:
    return f"({' | '.join(alternatives)})"


def _repeated(call: str, separator: str, several: bool) -> str:
    return f"{call} ({separator} {call})*" if several else call


def _hermes(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["hermes"].tags
    bodies = [
        f"{rules.words(_object(call, 'arguments'))} {call.arguments} {rules.words('}')}"
        for call in calls
    ]
    one = rules.rule("call", f'"\\n"? {_one_of(bodies)} "\\n"? {rules.words(tags[1], *tags)}')
    return _repeated(one, f'"\\n"? {rules.words(tags[0], *tags)}', several)


def _object(call: Call, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": '


def _llama3_json(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    bodies = [
        f"{rules.words(_object(call, 'parameters'))} {call.arguments} {rules.words('}')}"
        for call in calls
    ]
    return _repeated(rules.rule("call", _one_of(bodies)), '"; "', several)


def _mistral(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["mistral"].tags
    if rules.special_id("[ARGS]") is not None:  # the newer form: [TOOL_CALLS]name[ARGS]{..}
        call_id = ""
        if rules.special_id("[CALL_ID]") is not None:
            call_id = f"({rules.words('[CALL_ID]', *tags)} /[a-zA-Z0-9]{{9}}/)?"
        bodies = [
            f"{rules.words(call.name)} {call_id} {rules.words('[ARGS]', *tags)} {call.arguments}"
            for call in calls
        ]
        one = rules.rule("call", _one_of(bodies))
        return _repeated(one, rules.words("[TOOL_CALLS]", *tags), several)
    bodies = [
        f"{rules.words(_object(call, 'arguments'))} {call.arguments} {rules.words('}')}"
        for call in calls
    ]
    one = rules.rule("call", _one_of(bodies))
    return f'" "? "[" {_repeated(one, rules.words(", "), several)} "]"'


def _deepseek(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["deepseek_v3"].tags
    _, calls_end, begin, end, sep = (rules.words(tag, *tags) for tag in tags)
    bodies = []
    for call in calls:
        name, arguments = rules.words(call.name), call.arguments
        bodies.append(f"{name} {sep} {arguments}")
        fenced = f'"\\n```json\\n" {arguments} "\\n```"'
        bodies.append(f'"function" {sep} {name} {fenced}')
    one = rules.rule("call", f"{begin} {_one_of(bodies)} {end}")
    return f"{_repeated(one, _NEW_LINE, several)} {calls_end}"


def _kimi(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["kimi_k2"].tags
    _, calls_end, begin, end, arguments = (rules.words(tag, *tags) for tag in tags)
    bodies = [
        f"{rules.words(f'functions.{call.name}:')} /[0-9]{{1,3}}/ {arguments} {call.arguments}"
        for call in calls
    ]
    one = rules.rule("call", f"{begin} {_one_of(bodies)} {end}")
    return f"{_repeated(one, '', several)} {calls_end}"


def _qwen3_coder(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["qwen3_coder"].tags
    around = ArgumentTags("<parameter={}>\n", "\n</parameter>", "\n", tags[1], tags)
    bodies = [
        f"{rules.words(f'<function={call.name}>')} {_NEW_LINE} "
        f"{tagged_arguments(rules, around, call.parameters, call.param)} "
        f"{rules.words('</function>')}"
        for call in calls
    ]
    one = rules.rule(
        "call", f"{_NEW_LINE} {_one_of(bodies)} {_NEW_LINE} {rules.words(tags[1], *tags)}"
    )
    return _repeated(one, f"{_NEW_LINE} {rules.words(tags[0], *tags)}", several)


def _glm45(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    tags = FORMATS["glm45"].tags
    opening = "<arg_key>{}</arg_key>\n<arg_value>"
    around = ArgumentTags(opening, "</arg_value>", "\n", tags[1], tags)
    bodies = [
        f"{rules.words(call.name)} {_NEW_LINE} "
        f"{tagged_arguments(rules, around, call.parameters, call.param)}"
        for call in calls
    ]
    one = rules.rule("call", f"{_one_of(bodies)} {rules.words(tags[1], *tags)}")
    return _repeated(one, f"{_NEW_LINE} {rules.words(tags[0], *tags)}", several)


def _pythonic(rules: Rules, calls: Sequence[Call], several: bool) -> str:
    """Values as JSON, which is read as well as Python's own."""
    bodies = []
    for call in calls:
        if not call.name.isidentifier():
            raise unsupported(call.param, "", f"{call.name!r} is no name of Python")
        arguments = python_arguments(rules, call.parameters, call.param)
        bodies.append(f"{rules.words(f'{call.name}(')} {arguments} {rules.words(')')}")
    return f'"[" {_repeated(rules.rule("call", _one_of(bodies)), rules.words(", "), several)} "]"'


_GRAMMARS = {
    "hermes": ToolGrammar(FORMATS["hermes"].tags[0], _hermes),
    "llama3_json": ToolGrammar(None, _llama3_json),
    "mistral": ToolGrammar(FORMATS["mistral"].tags[0], _mistral),
    "deepseek_v3": ToolGrammar(FORMATS["deepseek_v3"].tags[0], _deepseek),
    "kimi_k2": ToolGrammar(FORMATS["kimi_k2"].tags[0], _kimi),
    "qwen3_coder": ToolGrammar(FORMATS["qwen3_coder"].tags[0], _qwen3_coder),
    "glm45": ToolGrammar(FORMATS["glm45"].tags[0], _glm45),
    "pythonic": ToolGrammar(None, _pythonic, "["),
}


def grammar_of(tool_format: str | None, param: str) -> ToolGrammar:
    """Of a format by its name in `text/chat_format.TOOLS`."""
    if tool_format is None:
        raise RequestError(
            "unsupported",
            f"{param}: this model's chat template has no tool calls that we know; name a "
            "tool_parser at the start of the server",
            param,
        )
    return _GRAMMARS[tool_format]


def calls_of(
    rules: Rules, tools: Sequence[Mapping[str, Any]], names: Sequence[str] | None
) -> list[Call]:
    """Those of these names, all if None. A tool without parameters takes any object."""
    calls = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        if names is None or function["name"] in names:
            parameters = function.get("parameters")
            param = f"tools[{i}].function.parameters"
            is_any = parameters is None or parameters is True
            if not is_any and not isinstance(parameters, dict):
                schema_grammar(json.dumps(parameters), param)  # says what is wrong
            calls.append(Call(function["name"], None if is_any else parameters, param, rules))
    return calls


def forced(rules: Rules, form: ToolGrammar, calls: Sequence[Call], several: bool) -> str:
    """The message is calls and nothing else."""
    body = form.calls(rules, calls, several)
    return body if form.opening is None else f"{rules.words(form.opening, form.opening)} {body}"


def offered(rules: Rules, form: ToolGrammar, calls: Sequence[Call], several: bool) -> str:
    """Any text, or calls, before which there may be text."""
    body = form.calls(rules, calls, several)
    text = rules.rule("TEXT", ANY_TEXT)
    if form.opening is None:  # no tag: what begins like a call is one
        plain = rules.rule("PLAIN", rf"/([^\{form.first}](.|\n)*)?/")
        return f"({body} | {plain})"
    return f"({rules.up_to('until', form.opening)} {body} {text} | {text})"
