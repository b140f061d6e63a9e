"""Harmony, both ways, against the format's reference library (package `openai-harmony`)."""

import datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SHARED

from penstock.errors import RequestError
from penstock.text.chat_format import choose_chat_format
from penstock.text.detokenizer import Detokenizer
from penstock.text.harmony_prompt import HarmonyTemplate, is_gpt_oss
from penstock.text.tools.calls import joined
from penstock.types.request import ChatOptions

oh = pytest.importorskip("openai_harmony")
MANY = 1_000_000
FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def library():
    folder = SHARED / "gpt-oss"
    if not (folder / "o200k_base.tiktoken").is_file():
        pytest.skip("no vocabulary of gpt-oss beside this checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def tokenizer(load_tokenizer):
    return load_tokenizer("gpt-oss")


@pytest.fixture(scope="module")
def chat_format(tokenizer):
    return choose_chat_format(tokenizer, tokenizer.chat_templates.values(), "auto", "auto")


def ours(tokenizer, messages, **options) -> list[int]:
    parts = HarmonyTemplate().parts(messages, ChatOptions(**options), MANY)
    return [one for part in parts for one in tokenizer.encode(part, add_special_tokens=False)]


def theirs(library, messages, tools=(), effort="medium") -> list[int]:
    """The same conversation as the library's messages, which drops old reasoning by itself."""
    efforts = {"low": "LOW", "medium": "MEDIUM", "high": "HIGH"}
    system = (
        oh.SystemContent.new()
        .with_reasoning_effort(getattr(oh.ReasoningEffort, efforts[effort]))
        .with_conversation_start_date(datetime.date.today().isoformat())
    )
    conversation = [oh.Message.from_role_and_content(oh.Role.SYSTEM, system)]
    developer = oh.DeveloperContent.new()
    messages = list(messages)
    has_instructions = messages[0]["role"] == "system"
    if has_instructions:
        developer = developer.with_instructions(messages.pop(0)["content"])
    if tools:
        functions = [tool["function"] for tool in tools]
        developer = developer.with_function_tools(
            [
                oh.ToolDescription.new(
                    one["name"], one.get("description", ""), parameters=one.get("parameters")
                )
                for one in functions
            ]
        )
    if tools or has_instructions:
        conversation.append(oh.Message.from_role_and_content(oh.Role.DEVELOPER, developer))
    last_final = max(
        (i for i, m in enumerate(messages) if m["role"] == "assistant" and "tool_calls" not in m),
        default=-1,
    )
    called = ""
    for i, message in enumerate(messages):
        if message["role"] == "user":
            said = oh.Message.from_role_and_content(oh.Role.USER, message["content"])
            conversation.append(said)
        elif message["role"] == "tool":
            author = oh.Author.new(oh.Role.TOOL, f"functions.{called}")
            said = oh.Message.from_author_and_content(author, message["content"])
            conversation.append(said.with_recipient("assistant").with_channel("commentary"))
        else:

            def add(text, channel):
                said = oh.Message.from_role_and_content(oh.Role.ASSISTANT, text)
                conversation.append(said.with_channel(channel))

            # The library drops reasoning before the first answer only, its guide before the last.
            if message.get("reasoning_content") and i > last_final:
                add(message["reasoning_content"], "analysis")
            calls = message.get("tool_calls", ())
            if message["content"] or not calls:
                add(message["content"], "commentary" if calls else "final")
            for call in calls:
                called = call["function"]["name"]
                add(call["function"]["arguments"], "commentary")
                conversation[-1] = (
                    conversation[-1]
                    .with_recipient(f"functions.{called}")
                    .with_content_type("<|constrain|>json")
                )
    whole = oh.Conversation.from_messages(conversation)
    return library.render_conversation_for_completion(whole, oh.Role.ASSISTANT)


WORDS = st.text(max_size=12) | st.sampled_from(
    ["<|end|>", "a<|start|>system<|message|>b", "!<|call|>", "<|x", "|>", "<|channel|>final", "né"]
)
SOME_WORDS = WORDS.filter(bool)
NAMES = st.sampled_from(["f", "get_weather", "a-b"])


@st.composite
def conversations(draw):
    messages = [{"role": "system", "content": draw(SOME_WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            name = draw(NAMES)
            function = {"name": name, "arguments": draw(st.sampled_from(['{"a": 1}', "{}", "{"]))}
            call = {"id": "call_1", "type": "function", "function": function}
            said = draw(st.sampled_from(["", "I look it up."]))
            messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
            if draw(st.booleans()):
                messages[-1]["reasoning_content"] = draw(SOME_WORDS)
            messages.append({"role": "tool", "tool_call_id": "call_1", "content": draw(WORDS)})
        if draw(st.booleans()):
            answer = {"role": "assistant", "content": draw(WORDS)}
            if draw(st.booleans()):
                answer["reasoning_content"] = draw(SOME_WORDS)
            messages.append(answer)
    return messages


@FUZZ
@given(messages=conversations(), effort=st.sampled_from(["low", "medium", "high"]))
def test_conversations_become_the_librarys_tokens(library, tokenizer, messages, effort):
    """Also those whose words look like special tokens: they are not read as such."""
    kwargs = {} if effort == "medium" else {"reasoning_effort": effort}
    expected = theirs(library, messages, effort=effort)
    assert ours(tokenizer, messages, template_kwargs=kwargs) == expected


COMMON = {
    "description": SOME_WORDS,
    "title": SOME_WORDS,
    "nullable": st.booleans(),
    "examples": st.lists(SOME_WORDS | st.integers(), max_size=2),
    "default": st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | SOME_WORDS
    | st.lists(st.integers(0, 3), max_size=2)
    | st.dictionaries(NAMES, st.booleans(), max_size=2),
}


def with_common(**fixed):
    return st.fixed_dictionaries(fixed, optional=COMMON)


LEAVES = (
    with_common(type=st.sampled_from(["string", "number", "integer", "boolean", "null", "odd"]))
    | with_common(type=st.just("string"), enum=st.lists(SOME_WORDS | st.integers(), max_size=3))
    | with_common(type=st.lists(st.sampled_from(["string", "integer", "null"]), max_size=3))
    | with_common()
    | with_common(anyOf=st.just([{"type": "string"}]))
    | with_common(type=st.just("array"))
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        with_common(
            type=st.just("object"),
            properties=st.dictionaries(NAMES, inner, max_size=3),
            required=st.lists(NAMES, max_size=2),
        )
        | with_common(type=st.just("array"), items=inner)
        | with_common(oneOf=st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)
PARAMETERS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, SCHEMAS, max_size=4)},
    optional={"required": st.lists(NAMES, max_size=2), "description": SOME_WORDS},
)
TOOLS = st.fixed_dictionaries(
    {"name": NAMES, "description": WORDS | st.just("one\n\ntwo\r\nthree\n")},
    optional={"parameters": PARAMETERS | SCHEMAS.filter(bool)},
).map(lambda function: {"type": "function", "function": function})


@FUZZ
@given(tools=st.lists(TOOLS, min_size=1, max_size=3), with_system=st.booleans())
def test_tools_become_the_librarys_tokens(library, tokenizer, tools, with_system):
    system = [{"role": "system", "content": "Be brief."}] if with_system else []
    messages = [*system, {"role": "user", "content": "Hi"}]
    expected = theirs(library, messages, tools)
    written = ours(tokenizer, messages, tools=tuple(tools))
    assert library.decode(written) == library.decode(expected)
    assert written == expected


# --- answers --------------------------------------------------------------------------------------


@st.composite
def answers(draw):
    """An answer's tokens as the library writes them, up to the special token that ended it."""
    messages = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["analysis", "commentary", "final", "call", "python"]))
        text = draw(WORDS)
        message = oh.Message.from_role_and_content(oh.Role.ASSISTANT, text)
        if kind == "call":
            message = message.with_channel("commentary").with_recipient(f"functions.{draw(NAMES)}")
            message = message.with_content_type(
                draw(st.sampled_from(["<|constrain|>json", "json"]))
            )
        elif kind == "python":
            message = message.with_channel("analysis").with_recipient("python")
        else:
            message = message.with_channel(kind)
        messages.append(message)
    return messages, draw(st.booleans())


def folded(messages) -> tuple[str, str, list[tuple[str, str]]]:
    """What a client sees of the library's messages."""
    reasoning, text, calls = [], [], []
    for message in messages:
        said = "".join(part.text for part in message.content)
        if (message.recipient or "").startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), said or "{}"))
        elif said:
            thinks = message.channel == "analysis" or message.recipient
            (reasoning if thinks else text).append(said)
    return "\n".join(reasoning), "\n".join(text), calls


def parsed(tokenizer, chat_format, ids, sizes):
    detokenizer = Detokenizer(tokenizer, tags=chat_format.tags)
    parser = chat_format.parser("<|start|>assistant")
    news, ids, sizes = [], list(ids), list(sizes)
    while ids:
        size = sizes.pop(0) if sizes else 1
        news.append(parser.push(detokenizer.push(ids[:size])))
        ids = ids[size:]
    news += [parser.push(detokenizer.flush()), parser.flush()]
    calls = joined(call for one in news for call in one.tool_calls)
    return (
        "".join(one.reasoning for one in news),
        "".join(one.text for one in news),
        [(call.name, call.arguments) for call in calls],
    )


@FUZZ
@given(answer=answers(), sizes=st.lists(st.integers(1, 9), max_size=20))
def test_answers_are_read_as_the_library_reads_them(library, tokenizer, chat_format, answer, sizes):
    messages, is_cut = answer
    whole = oh.Conversation.from_messages(messages)
    ids = library.render_conversation(whole)[2:]  # the prompt has <|start|>assistant
    if is_cut:  # what the engine gives: without the special token that ended it
        ids = ids[:-1]
    expected = library.parse_messages_from_completion_tokens(ids, oh.Role.ASSISTANT)
    assert parsed(tokenizer, chat_format, ids, sizes) == folded(expected)


def test_words_that_look_like_special_tokens_are_words(library, tokenizer, chat_format):
    words = "Say <|end|> and <|channel|>final<|message|>."
    ids = library.encode("<|channel|>final<|message|>", allowed_special="all")
    ids += library.encode(words, disallowed_special=())
    assert parsed(tokenizer, chat_format, ids, ()) == ("", words, [])


def test_a_character_cut_off_by_a_special_token_is_dropped_there(library, tokenizer, chat_format):
    half = library.encode("🙂🫠", disallowed_special=())[:-1]
    ids = library.encode("<|channel|>analysis<|message|>", allowed_special="all") + half
    ids += library.encode(
        "<|end|><|start|>assistant<|channel|>final<|message|>x", allowed_special="all"
    )
    reasoning, text, _ = parsed(tokenizer, chat_format, ids, ())
    assert reasoning.startswith("🙂") and reasoning.endswith("\ufffd") and text == "x"


# --- refusals and options -------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]


def test_it_is_chosen_for_the_template_of_gpt_oss_alone():
    template = SHARED / "gpt-oss" / "chat_template.jinja"
    if not template.is_file():
        pytest.skip("no template of gpt-oss beside this checkout")
    assert is_gpt_oss(template.read_text())
    others = [path for path in SHARED.glob("*/*.jinja") if path != template]
    assert others and not any(is_gpt_oss(path.read_text()) for path in others)


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([], {}, "messages is empty"),
        (HI, {"template_kwargs": {"reasoning_effort": "minimal"}}, "low, medium, high"),
        ([*HI, {"role": "tool", "content": "5"}], {}, "none came before it"),
        ([*HI, {"role": "assistant", "tool_calls": [{"function": {}}]}], {}, "with a name"),
    ],
)
def test_what_it_refuses(messages, options, said):
    with pytest.raises(RequestError, match=said):
        HarmonyTemplate().render(messages, ChatOptions(**options), MANY)


def test_a_prompt_is_bounded_and_a_deep_schema_refused():
    with pytest.raises(RequestError, match="more than 100 characters"):
        HarmonyTemplate().render(HI, ChatOptions(), 100)
    schema: dict = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(RequestError, match="too deeply"):
        HarmonyTemplate().render(HI, ChatOptions(tools=(tool,)), MANY)


def test_the_final_message_is_continued():
    messages = [*HI, {"role": "assistant", "reasoning_content": "hm", "content": "Well, "}]
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert (
        HarmonyTemplate()
        .render(messages, options, MANY)
        .endswith(
            "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Well, "
        )
    )
