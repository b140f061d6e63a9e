"""Prompts equal transformers' apply_chat_template for every template there is here."""

import json
import tracemalloc
from pathlib import Path

import pytest
from tiny_tokenizers import SHARED

from penstock.errors import ConfigError, RequestError
from penstock.text.chat import SIMPLE_TEMPLATE, ChatTemplate, read_chat_template
from penstock.text.harmony_prompt import HarmonyTemplate
from penstock.types.request import ChatOptions

MANY = 100_000
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Stadt> & Land",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "which"}},
            "required": ["city"],
        },
    },
}
PLAIN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüß Gott & <b>東京</b>"},
    {"role": "assistant", "content": "Hallo!"},
    {"role": "user", "content": "And now? "},
]
WITH_CALL = [
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call12345",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "sunny"},
]
SPECIALS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def real_templates():
    for folder in sorted(SHARED.glob("*")):
        config = folder / "tokenizer_config.json"
        template = json.loads(config.read_text()).get("chat_template") if config.is_file() else None
        if template:
            yield pytest.param(template, id=f"{folder.name}/tokenizer_config")
        for path in sorted(folder.glob("*.jinja")):
            yield pytest.param(path.read_text(encoding="utf8"), id=f"{folder.name}/{path.name}")


REAL_TEMPLATES = list(real_templates())


@pytest.fixture(scope="module")
def apply_chat_template():
    """transformers' rendering, with our special tokens and no model."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIALS)

    def apply(template, messages, **kwargs):
        return theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, **kwargs
        )

    return apply


def test_the_shared_templates_are_here():
    if not SHARED.is_dir():
        pytest.skip("no shared tokenizers beside this checkout")
    assert len(REAL_TEMPLATES) >= 14


@pytest.mark.parametrize("template", REAL_TEMPLATES)
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (PLAIN, {"add_generation_prompt": True}),
        (PLAIN[1:3], {"add_generation_prompt": False}),
        (PLAIN, {"add_generation_prompt": True, "enable_thinking": False}),
        (PLAIN[:3], {"add_generation_prompt": False, "continue_final_message": True}),
    ],
    ids=["plain", "no-prompt", "kwargs", "continue"],
)
def test_rendered_exactly_as_transformers(template, messages, options, apply_chat_template):
    expected = apply_chat_template(template, messages, **options)
    assert render(template, messages, options) == expected


@pytest.mark.parametrize("template", REAL_TEMPLATES)
def test_tools_are_rendered_as_transformers_does_or_refused_where_they_would_be_dropped(
    template, apply_chat_template
):
    options = {"add_generation_prompt": True}
    expected = apply_chat_template(template, PLAIN, **options, tools=[TOOL])
    if expected == apply_chat_template(template, PLAIN, **options):
        with pytest.raises(RequestError, match="no place for tools"):
            render(template, PLAIN, options | {"tools": [TOOL]})
    else:
        assert render(template, PLAIN, options | {"tools": [TOOL]}) == expected


@pytest.mark.parametrize("template", REAL_TEMPLATES)
def test_tool_calls_are_rendered_as_transformers_does_in_the_form_the_template_wants(
    template, apply_chat_template
):
    """OpenAI sends arguments as JSON text; transformers' users pass what the template needs."""
    as_object = json.loads(json.dumps(WITH_CALL))
    call = as_object[1]["tool_calls"][0]["function"]
    call["arguments"] = json.loads(call["arguments"])
    try:
        expected = apply_chat_template(template, as_object, tools=[TOOL])
    except TypeError:
        expected = apply_chat_template(template, WITH_CALL, tools=[TOOL])
    options = {"add_generation_prompt": False, "tools": [TOOL]}
    if apply_chat_template(template, PLAIN, tools=[TOOL]) == apply_chat_template(template, PLAIN):
        del options["tools"]  # they would be dropped, which is refused; the calls are not
    assert render(template, WITH_CALL, options) == expected
    assert render(template, as_object, options) == expected


def render(template, messages, options):
    options = dict(options)
    known = {
        name: options.pop(name, default)
        for name, default in (("add_generation_prompt", True), ("continue_final_message", False))
    }
    tools = tuple(options.pop("tools", ()))
    chat = ChatOptions(**known, tools=tools, template_kwargs=options)
    return ChatTemplate({"default": template}, SPECIALS).render(messages, chat, MANY)


def test_text_parts_are_joined_and_other_parts_refused():
    template = ChatTemplate({"default": SIMPLE_TEMPLATE}, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}], ChatOptions(), MANY) == (
        "user: a\nb\nassistant:"
    )
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match="'image_url' is not supported"):
        template.render(image, ChatOptions(), MANY)


def test_documents_and_generation_tag():
    text = (
        "{% for d in documents %}{{ d.title }};{% endfor %}{% generation %}x{% endgeneration %}\n"
    )
    options = ChatOptions(documents=({"title": "one"}, {"title": "two"}))
    rendered = ChatTemplate({"default": text}, {}).render([{"role": "user"}], options, MANY)
    assert rendered == "one;two;x"


def test_requests_with_tools_use_the_tool_template():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    message = [{"role": "user", "content": "x"}]
    assert template.render(message, ChatOptions(), MANY) == "plain"
    assert template.render(message, ChatOptions(tools=(TOOL,)), MANY) == "weather"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # the sandbox
        "{% set _ = messages.append(1) %}",  # and its immutability
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_a_request_error(source):
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate({"default": source}, {}).render(
            [{"role": "user", "content": "x"}], ChatOptions(), MANY
        )


def test_rendered_size_is_bounded():
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}spam{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": endless}, {})
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "x"}], ChatOptions(), 1000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([], ChatOptions(), "messages is empty"),
        ([{"content": "x"}], ChatOptions(), "needs a 'role'"),
        ([{"role": "user"}], ChatOptions(continue_final_message=True), "not both"),
        (
            [{"role": "user"}],
            ChatOptions(continue_final_message=True, add_generation_prompt=False),
            "no content",
        ),
        (
            [{"role": "user"}],
            ChatOptions(template_kwargs={"messages": []}),
            "may not set 'messages'",
        ),
    ],
)
def test_bad_chat_requests_are_refused(messages, options, expected):
    with pytest.raises(RequestError, match=expected):
        ChatTemplate({"default": SIMPLE_TEMPLATE}, {}).render(messages, options, MANY)


def with_arguments(arguments):
    call = {"id": "call00000", "type": "function", "function": {"name": "f"}}
    call["function"]["arguments"] = arguments
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": ["\\u00fc"]}', '{"a": ["ü"]}'),
        ('{"a": "\\ud83d\\ude00"}', '{"a": "😀"}'),
        # What is malformed, or no template could write, stays the text that it was.
        ("[" * 1000, json.dumps("[" * 1000)),
        ("[" * 1000 + "]" * 1000, json.dumps("[" * 1000 + "]" * 1000)),
        ('{"a": "\\ud800"}', json.dumps('{"a": "\\ud800"}')),
        ("[" + "[]," * 100_000 + "1]", json.dumps("[" + "[]," * 100_000 + "1]")),
    ],
)
def test_odd_arguments_of_a_tool_call_are_rendered(arguments, expected):
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    template = ChatTemplate({"default": source}, {})
    assert template.render(with_arguments(arguments), ChatOptions(), 10**6) == expected


def test_a_template_that_writes_no_characters_is_a_request_error():
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        ChatTemplate({"default": "{{ '\\ud800' }}"}, {}).render(
            [{"role": "user", "content": "x"}], ChatOptions(), MANY
        )


def test_nothing_is_computed_while_a_template_is_compiled():
    """With folding this would be a text of 40 MB in the compiled code, made at once."""
    source = "{% if x %}{{ 'a' * 40000000 }}{% set y = 'b' * 40000000 %}{% endif %}"
    tracemalloc.start()
    try:
        ChatTemplate({"default": source}, {})
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_syntax_error_is_found_when_loading():
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})


def test_chat_template_option_is_simple_a_file_or_the_text(tmp_path: Path):
    path = tmp_path / "x.jinja"
    path.write_text("{{ messages }}")
    assert read_chat_template("simple") == SIMPLE_TEMPLATE
    assert read_chat_template(str(path)) == "{{ messages }}"
    assert read_chat_template("{{ 1 }}") == "{{ 1 }}"
    with pytest.raises(ConfigError, match="neither"):
        read_chat_template(str(tmp_path / "missing.jinja"))


WITHOUT_TOOLS = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_what_a_template_has_no_place_for_is_refused_with_the_way_out(field):
    template = ChatTemplate({"default": WITHOUT_TOOLS}, {})
    with pytest.raises(RequestError, match=f"no place for {field}.*--chat_template") as refusal:
        template.render(PLAIN, ChatOptions(**{field: (TOOL,)}), MANY)
    assert (refusal.value.code, refusal.value.param) == ("unsupported", field)
    assert ('tool_choice to "none"' in refusal.value.message) == (field == "tools")


def test_verbosity_goes_to_a_template_that_reads_it_and_is_refused_by_others():
    options = ChatOptions(template_kwargs={"verbosity": "low"})
    template = ChatTemplate({"default": WITHOUT_TOOLS + "{{ verbosity }}"}, {})
    assert template.render(PLAIN, options, MANY).endswith("low")
    for other in (ChatTemplate({"default": WITHOUT_TOOLS}, {}), HarmonyTemplate()):
        with pytest.raises(RequestError, match=r"no place for verbosity.*leave it out") as refusal:
            other.render(PLAIN, options, MANY)
        assert (refusal.value.code, refusal.value.param) == ("unsupported", "verbosity")


@pytest.mark.parametrize("use", ["' ' + m.content", "m.content.strip()", "m.content | length"])
def test_a_null_that_the_template_cannot_take_is_said_in_a_sentence(use):
    template = ChatTemplate(
        {"default": f"{{% for m in messages %}}{{{{ {use} }}}}{{% endfor %}}"}, {}
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    with pytest.raises(RequestError) as refusal:
        template.render(messages, ChatOptions(), MANY)
    assert "messages[1].content is null, which it cannot take" in refusal.value.message
    assert "NoneType" not in refusal.value.message and "'None'" not in refusal.value.message


def test_what_a_template_says_itself_is_passed_on_also_beside_a_null():
    template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([{"role": "assistant", "content": None}], ChatOptions(), MANY)


def test_the_simple_template_writes_nothing_for_a_null():
    template = ChatTemplate({"default": SIMPLE_TEMPLATE}, {})
    messages = [{"role": "assistant", "content": None}, {"role": "user", "content": "Hi"}]
    text = template.render(messages, ChatOptions(), MANY)
    assert text == "assistant: \nuser: Hi\nassistant:"
