"""Renders messages into a prompt with a model's own chat template, in a sandbox.

Templates are Hugging Face's: jinja2 with loop controls, `raise_exception`, `strftime_now`, a
`tojson` that keeps Unicode, and a `generation` tag that has no effect here. Knows nothing of
tokens.
"""

import datetime
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.errors import ConfigError, RequestError
from penstock.text.json_outline import outline
from penstock.types.request import ChatOptions

# `--chat_template simple`: for base models and tests. One "role: content" line per message.
SIMPLE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_MAX_ARGUMENT_DEPTH = 32
_MAX_ARGUMENT_TEXTS = 1 << 16  # and as many lists
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_END_TAG = "\ue000end of the message to continue\ue001 "  # private use: no message holds it


def read_chat_template(given: str) -> str:
    """The template that `--chat_template` names: `simple`, a file, or the template text itself."""
    if given == "simple":
        return SIMPLE_TEMPLATE
    if "{{" in given or "{%" in given:
        return given
    path = Path(given)
    if not path.is_file():
        raise ConfigError(
            f"chat_template '{given}' is neither 'simple', a file that exists, nor a jinja template"
        )
    return path.read_text(encoding="utf8")


class ChatTemplate:
    """Compiled templates by name: `tool_use` serves requests with tools, `default` the rest."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if not templates:
            raise ConfigError("a chat template needs at least one template text")
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._compiled = {
                name: environment.from_string(text) for name, text in templates.items()
            }
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self._variables = {
            name: _names(environment.parse(text)) for name, text in templates.items()
        }
        self._wants_text_arguments = {
            name: self._renders_only_text_arguments(template)
            for name, template in self._compiled.items()
        }

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_chars: int
    ) -> str:
        """The prompt; `RequestError` if the template refuses or it grows over `max_chars`."""
        check_options(messages, options)
        name = self._choose(options)
        check_room(options, self._variables[name])
        plain = [plain_message(message, self._wants_text_arguments[name]) for message in messages]
        if options.continue_final_message:
            plain[-1]["content"] = _content_to_continue(plain[-1]) + _END_TAG
        text = self._render(self._compiled[name], plain, options, max_chars)
        return _cut_at_tag(text) if options.continue_final_message else text

    def parts(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_chars: int
    ) -> list[str]:
        """The prompt as it is tokenized: in one piece."""
        return [self.render(messages, options, max_chars)]

    def _choose(self, options: ChatOptions) -> str:
        if options.tools and "tool_use" in self._compiled:
            return "tool_use"
        return "default" if "default" in self._compiled else next(iter(self._compiled))

    def _render(
        self,
        template: jinja2.Template,
        messages: list[dict[str, Any]],
        options: ChatOptions,
        max_chars: int,
    ) -> str:
        variables = {
            **self._special_tokens,
            **options.template_kwargs,
            "messages": messages,
            "tools": list(options.tools) or None,
            "documents": list(options.documents) or None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        parts: list[str] = []
        num_chars = 0
        try:
            for part in template.generate(**variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > max_chars:
                    break
        except MemoryError:
            raise  # says nothing about the messages
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            raise RequestError(
                "invalid_value",
                f"the chat template refuses these messages: {_why(error, messages)}",
                "messages",
            ) from error
        check_size(num_chars, max_chars)
        text = "".join(parts)
        if not _is_text(text):
            raise RequestError(
                "invalid_value",
                "the chat template makes half of a surrogate pair of these messages, which is no "
                "character",
                "messages",
            )
        return text

    def _renders_only_text_arguments(self, template: jinja2.Template) -> bool:
        """Some templates paste tool-call arguments as JSON text; most expect an object."""
        return not self._renders_arguments(template, {"x": 1}) and self._renders_arguments(
            template, '{"x": 1}'
        )

    def _renders_arguments(self, template: jinja2.Template, arguments: object) -> bool:
        call = {
            "id": "call00000",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            self._render(template, messages, ChatOptions(), max_chars=1_000_000)
        except RequestError:
            return False
        return True


def _why(error: Exception, messages: Sequence[Mapping[str, Any]]) -> str:
    """What `raise_exception` said; else, of a null where a template wants a text, a sentence."""
    if type(error) is not jinja2.TemplateError:
        for index, message in enumerate(messages):
            if message.get("content") is None:
                return (
                    f"messages[{index}].content is null, which it cannot take; send a text, "
                    '"" if there is none'
                )
    return str(error)


def check_room(options: ChatOptions, variables: Container[str]) -> None:
    """A template that does not read them would drop them, and nobody would know."""
    verbosity = options.template_kwargs.get("verbosity")
    given = {"tools": options.tools, "documents": options.documents, "verbosity": verbosity}
    for field, value in given.items():
        if value and field not in variables:
            them = "it" if field == "verbosity" else "them"
            way_out = ', set tool_choice to "none"' if field == "tools" else ""
            raise RequestError(
                "unsupported",
                f"this model's chat template has no place for {field}: the model would not see "
                f"{them}; leave {them} out{way_out}, or start the server with a --chat_template "
                "that has one",
                field,
            )


def check_options(messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> None:
    if not messages:
        raise RequestError("invalid_value", "messages is empty; send at least one", "messages")
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "invalid_value",
            "continue_final_message needs add_generation_prompt: false; a prompt continues the "
            "last message or starts a new one, not both",
            "continue_final_message",
        )
    if clash := _RESERVED & options.template_kwargs.keys():
        raise RequestError(
            "invalid_value",
            f"chat_template_kwargs may not set '{min(clash)}'; it has a field of its own",
            "chat_template_kwargs",
        )


def check_size(num_chars: int, max_chars: int) -> None:
    if num_chars > max_chars:
        raise RequestError(
            "context_length_exceeded",
            f"the rendered messages have more than {max_chars} characters; shorten them or "
            "raise max_seq_len",
            "messages",
        )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body).set_lineno(lineno)]


class _NoFolding(jinja2.compiler.CodeGenerator):
    """Computes nothing while it compiles, however constant: `'a' * 10**10` is a constant, too."""

    def _output_child_to_const(
        self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, finalize: Any
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _NoFolding


def _names(template: jinja2.nodes.Template) -> set[str]:
    """What it reads, its own variables included. jinja2.meta would fold constants on the way."""
    return {name.name for name in template.find_all(jinja2.nodes.Name) if name.ctx == "load"}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        optimized=False,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, Unicode as it is, keys in their order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def plain_message(message: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    """A copy with the content as text and tool-call arguments in the form the template expects."""
    plain = dict(message)
    if not isinstance(plain.get("role"), str):
        raise RequestError("invalid_value", "every message needs a 'role'", "messages")
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "\n".join(_part_text(part) for part in plain["content"])
    if isinstance(plain.get("tool_calls"), list | tuple):
        plain["tool_calls"] = [_plain_call(call, text_arguments) for call in plain["tool_calls"]]
    return plain


def _plain_call(call: Any, text_arguments: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _plain_call(call["function"], text_arguments)}
    if "arguments" in call:
        return {**call, "arguments": _arguments(call["arguments"], text_arguments)}
    return call


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise RequestError(
            "invalid_value",
            f"content part of type '{kind}' is not supported; send parts of type 'text'",
            "messages",
        )
    return text


def _arguments(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return arguments if isinstance(arguments, str) else _tojson(arguments)
    if not isinstance(arguments, str):
        return arguments
    # A model's own malformed call, repeated in the history, stays text, and so does what no
    # template could write.
    try:
        found = outline(arguments.encode(), _MAX_ARGUMENT_TEXTS)
        num_parts = max(found.num_texts, found.num_lists)
        if found.depth > _MAX_ARGUMENT_DEPTH or num_parts > _MAX_ARGUMENT_TEXTS:
            return arguments
        parsed = json.loads(arguments)
        return parsed if "\\u" not in arguments or _is_text(_tojson(parsed)) else arguments
    except (ValueError, RecursionError):
        return arguments


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _content_to_continue(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RequestError(
            "invalid_value", "continue_final_message: the last message has no content", "messages"
        )
    return content


def _cut_at_tag(text: str) -> str:
    """The prompt up to the end of the message to continue, trimmed if the template trims it."""
    tag = _END_TAG.rstrip()
    at = text.rfind(tag)
    if at < 0:
        raise RequestError(
            "invalid_value",
            "continue_final_message: the chat template does not show the last message",
            "messages",
        )
    head = text[:at]
    return head if text.startswith(_END_TAG, at) else head.rstrip()
