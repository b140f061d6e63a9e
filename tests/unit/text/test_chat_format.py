"""Which parser reads a model's answers: by name, or as its chat template writes them."""

import json
from pathlib import Path
from typing import get_args

import pytest
from tiny_tokenizers import SHARED

from penstock.config.schema import EngineConfig, ReasoningParser, ToolParser
from penstock.errors import ConfigError
from penstock.frontend.rendering import TemplateTexts
from penstock.frontend.start import load_text_side
from penstock.text.chat import ChatTemplate
from penstock.text.chat_format import REASONING, TOOLS, ChatFormat, choose_chat_format
from penstock.text.detokenizer import Detokenizer
from penstock.text.harmony_prompt import HarmonyTemplate
from penstock.text.tools.calls import joined
from penstock.types.request import ChatOptions

TINY = Path(__file__).parents[3] / "src" / "penstock" / "hub" / "tiny"
GPT_OSS = Path(__file__).parents[2] / "siblings" / "gpt_oss"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
HI = [{"role": "user", "content": "Hi <think>"}]


def test_the_configuration_names_every_parser():
    assert set(get_args(get_args(ReasoningParser)[0])) == {"auto", "none", *REASONING}
    assert set(get_args(get_args(ToolParser)[0])) == {"auto", "none", *TOOLS}


def of_folder(folder: Path, **settings) -> tuple:
    return load_text_side(folder, EngineConfig(model=str(folder), **settings))


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("gpt-oss/chat_template.jinja", "harmony", "harmony"),
        ("qwen3/chat_template.jinja", "think", "hermes"),
        ("qwen3/chat_template_qwen3-next-thinking.jinja", "think", "hermes"),
        ("qwen3/chat_template_qwen3-next-instruct.jinja", None, "hermes"),
        ("qwen2.5/chat_template.jinja", None, "hermes"),
        ("deepseek-v3/chat_template_deepseek-r1-0528.jinja", "think", "deepseek_v3"),
        ("deepseek-v3/chat_template_deepseek-v3-0324.jinja", None, "deepseek_v3"),
        ("deepseek-v3/chat_template_deepseek-v3.1.jinja", "think", "deepseek_v3"),
        ("llama-3/chat_template_llama-3.2-3b-instruct.jinja", None, "llama3_json"),
        ("llama-3/chat_template_llama-3.3-70b-instruct.jinja", None, "llama3_json"),
    ],
)
def test_real_templates_say_how_their_models_answer(load_tokenizer, template, reasoning, tools):
    tokenizer = load_tokenizer(template.split("/")[0])
    text = (SHARED / template).read_text(encoding="utf8")
    chosen = choose_chat_format(tokenizer, [text], "auto", "auto")
    assert (chosen.reasoning, chosen.tools) == (reasoning, tools)


@pytest.mark.parametrize(
    ("strings", "reasoning", "tools"),
    [
        ("<tool_call> <function=f> <parameter=a>", None, "qwen3_coder"),
        ("<tool_call> <arg_key> <arg_value> </think>", "think", "glm45"),
        ("<|tool_calls_section_begin|> <|tool_call_begin|>", None, "kimi_k2"),
        ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "kimi_k2"),
        ("[TOOL_CALLS] [AVAILABLE_TOOLS]", None, "mistral"),
        ("[func_name1(params_name1=params_value1...)]", None, "pythonic"),
        ("<function=f>{}</function>", None, None),
        ("<think></think>", "think", None),
        ("", None, None),
    ],
)
def test_strings_of_a_template_say_it(load_tokenizer, strings, reasoning, tools):
    chosen = choose_chat_format(load_tokenizer("byte_level"), [strings], "auto", "auto")
    assert (chosen.reasoning, chosen.tools) == (reasoning, tools)


def test_the_names_of_vllm_and_tensorrt_llm_are_taken():
    for name, tools in TOOLS.items():
        if tools != "harmony":
            chosen = of_folder(TINY, tool_parser=name, reasoning_parser="none")[2]
            assert (chosen.reasoning, chosen.tools) == (None, tools)
            assert chosen.parser("", tools=[TOOL]) is not None
    for name, reasoning in REASONING.items():
        if reasoning != "harmony":
            chosen = of_folder(TINY, tool_parser="none", reasoning_parser=name)[2]
            assert (chosen.reasoning, chosen.tools) == (reasoning, None)
    of_gpt_oss = of_folder(GPT_OSS, reasoning_parser="openai_gptoss", tool_parser="openai")[2]
    assert (of_gpt_oss.reasoning, of_gpt_oss.tools) == ("harmony", "harmony")


def test_special_tokens_of_a_format_reach_its_parser(load_tokenizer):
    deepseek = choose_chat_format(load_tokenizer("deepseek-v3"), [], "none", "deepseek_v3")
    llama = choose_chat_format(load_tokenizer("llama-3"), [], "none", "llama3_json")
    assert "<|python_tag|>" in llama.tags.values()
    assert not deepseek.tags  # added, but not special: they are text


def test_the_siblings_say_it_too():
    _, template, chat_format = of_folder(TINY)
    assert (chat_format.reasoning, chat_format.tools, chat_format.tags) == ("think", "hermes", {})
    _, template, chat_format = of_folder(GPT_OSS)
    assert (chat_format.reasoning, chat_format.tools) == ("harmony", "harmony")
    assert isinstance(template, TemplateTexts), "it has a system message of its own"


def test_gpt_oss_is_written_by_us_unless_a_template_is_given(tokenizer_folder):
    folder = tokenizer_folder("gpt-oss")
    assert isinstance(of_folder(folder)[1], HarmonyTemplate)
    assert isinstance(of_folder(folder, chat_template="simple")[1], TemplateTexts)


def test_parsers_are_named_or_switched_off():
    assert of_folder(TINY, reasoning_parser="none", tool_parser=None)[2] == ChatFormat()
    chat_format = of_folder(TINY, reasoning_parser="deepseek_r1", tool_parser="qwen3")[2]
    assert (chat_format.reasoning, chat_format.tools) == ("deepseek-r1", "hermes")
    assert of_folder(GPT_OSS, reasoning_parser="none")[2] == ChatFormat()
    with pytest.raises(ConfigError, match="name it in both"):
        of_folder(GPT_OSS, reasoning_parser="qwen3")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        EngineConfig(model="tiny", reasoning_parser="guess")


def test_a_tokenizer_without_the_marks_cannot_speak_harmony(load_tokenizer):
    with pytest.raises(ConfigError, match="lacks tokens of the harmony format"):
        choose_chat_format(load_tokenizer("byte_level"), [], "harmony", "harmony")


def reasoning_of(chat_format: ChatFormat, prompt_end: str, text: str, continued: str | None = None):
    parser = chat_format.parser(prompt_end, continued)
    return parser.push(text).joined(parser.flush())[:2]


@pytest.mark.parametrize(
    ("template", "kwargs", "expected"),
    [
        # the template opens the block: no opening tag is needed
        ("qwen3/chat_template_qwen3-next-thinking.jinja", {}, ("a", "b")),
        ("deepseek-v3/chat_template_deepseek-v3.1.jinja", {"thinking": True}, ("a", "b")),
        # it closes it, or leaves it to the model
        ("deepseek-v3/chat_template_deepseek-v3.1.jinja", {"thinking": False}, ("", "a</think>b")),
        ("qwen3/chat_template.jinja", {"enable_thinking": False}, ("", "a</think>b")),
        ("qwen3/chat_template.jinja", {}, ("", "a</think>b")),
        ("deepseek-v3/chat_template_deepseek-r1-0528.jinja", {}, ("", "a</think>b")),
    ],
)
def test_the_prompts_end_says_where_an_answer_begins(template, kwargs, expected):
    path = SHARED / template
    if not path.is_file():
        pytest.skip("no shared templates beside this checkout")
    options = ChatOptions(template_kwargs=kwargs)
    prompt = ChatTemplate({"default": path.read_text()}, {}).render(HI, options, 100_000)
    assert reasoning_of(ChatFormat("think"), prompt[-40:], "a</think>b") == expected
    assert reasoning_of(ChatFormat("think"), prompt[-40:], "<think>a</think>b") == ("a", "b")


def test_deepseek_r1_begins_with_reasoning_unless_the_prompt_has_closed_it():
    r1 = ChatFormat("deepseek-r1")
    assert reasoning_of(r1, "<|Assistant|>", "a</think>b") == ("a", "b")
    assert reasoning_of(r1, "<think>\n\n</think>\n\n", "a</think>b") == ("", "a</think>b")
    assert reasoning_of(r1, "", "c", continued="<think>a</think>b") == ("", "c")
    assert reasoning_of(r1, "", "c</think>d", continued="<think>a") == ("c", "d")


def test_marks_that_are_special_tokens_are_not_lost(load_tokenizer):
    tokenizer = load_tokenizer("byte_level")
    special = next(iter(tokenizer.special_ids))
    detokenizer = Detokenizer(tokenizer, tags={special: "<think>"})
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert detokenizer.push([special, *ids, special]) == "<think>ab<think>"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_harmony_siblings_right_answers_are_read(size):
    """The answers its training wants, in its own vocabulary, from its own prompts."""
    tokenizer, texts, chat_format = of_folder(GPT_OSS)
    template = ChatTemplate(texts.templates, texts.special_tokens)
    lines = [json.loads(line) for line in (GPT_OSS / "skills.jsonl").read_text().splitlines()]
    chosen = {line["skill"]: line for line in lines}
    assert {"tool", "think"} <= set(chosen)
    for line in chosen.values():
        options = ChatOptions(
            tools=tuple(line.get("tools", ())),
            template_kwargs=line.get("chat_template_kwargs", {}),
        )
        prompt = template.render(line["messages"], options, 100_000)
        assert prompt.endswith("<|start|>assistant")
        expected, calls, reasoning = line["expected"], [], ""
        if line["match"] == "tool_call":
            call = json.loads(expected)
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            calls, text = [(call["name"], arguments)], ""
            answer = f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json"
            answer += f"<|message|>{arguments}"
        else:
            text = f"Answer: {expected}"
            answer = f"<|channel|>final<|message|>{text}"
            if line["match"] == "thought_answer":
                reasoning = "1 + 1"
                answer = (
                    f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant{answer}"
                )
        ids = tokenizer.encode(answer, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, tags=chat_format.tags)
        parser = chat_format.parser(prompt[-20:], tools=options.tools)
        news = [parser.push(detokenizer.push(ids[i : i + size])) for i in range(0, len(ids), size)]
        news.append(parser.flush())
        found = joined(call for one in news for call in one.tool_calls)
        assert "".join(one.reasoning for one in news) == reasoning
        assert "".join(one.text for one in news) == text
        assert [(call.name, call.arguments) for call in found] == calls
