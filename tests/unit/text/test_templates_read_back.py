"""Each real template's own writing of tool calls is read back: names and arguments are equal.

Through the real vocabulary as well, in which some tags are special tokens.
"""

import json

import llguidance
import pytest
from tiny_tokenizers import SHARED

from penstock.text.chat import ChatTemplate
from penstock.text.chat_format import choose_chat_format
from penstock.text.detokenizer import Detokenizer
from penstock.text.grammars.output_grammar import output_grammar
from penstock.text.tools.calls import joined
from penstock.types.request import ChatOptions, ToolRule

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells it.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "additionalProperties": True,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
)
CALLS = [
    ("weather", {"city": 'Köln "</tool_call>" 🙂', "days": 2, "more": {"a": [None, True, -1.5]}}),
    ("now", {}),
]
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|call|>")
# template -> how many calls it writes into one message, and the content before them
TEMPLATES = {
    "deepseek-v3/chat_template_deepseek-r1-0528.jinja": (2, "I look."),
    "deepseek-v3/chat_template_deepseek-v3-0324.jinja": (2, "I look."),
    "deepseek-v3/chat_template_deepseek-v3.1.jinja": (2, "I look."),
    "gpt-oss/chat_template.jinja": (1, ""),
    "llama-3/chat_template_llama-3.2-3b-instruct.jinja": (1, ""),
    "llama-3/chat_template_llama-3.3-70b-instruct.jinja": (1, ""),
    "qwen2.5/chat_template.jinja": (2, "I look."),
    "qwen3/chat_template.jinja": (2, "I look."),
    "qwen3/chat_template_qwen3-next-instruct.jinja": (2, "I look."),
    "qwen3/chat_template_qwen3-next-thinking.jinja": (2, "I look."),
}


def written(source: str, calls: list, content: str) -> tuple[str, str]:
    """The end of the prompt, and what the template has the assistant say after it."""
    template = ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""})
    user = {"role": "user", "content": "What now?"}
    assistant = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call0000{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }
    tools = TOOLS if "tools" in source else ()  # DeepSeek V3's is told of them otherwise
    prompt = template.render([user], ChatOptions(tools=tools), 10**6)
    options = ChatOptions(tools=tools, add_generation_prompt=False)
    whole = template.render([user, assistant], options, 10**6)
    if not whole.startswith(prompt):  # it opens a block of reasoning, which this message lacks
        prompt = prompt.removesuffix("<think>\n")
    assert whole.startswith(prompt)
    answer = whole[len(prompt) :]
    ends = [answer.find(end) for end in ENDS if end in answer]
    return prompt[-40:], answer[: min(ends)]


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize("path", TEMPLATES)
def test_a_templates_own_calls_are_read_back(load_tokenizer, path, size):
    tokenizer = load_tokenizer(path.split("/")[0])  # skips where there are no real ones
    source = (SHARED / path).read_text(encoding="utf8")
    num_calls, content = TEMPLATES[path]
    chat_format = choose_chat_format(tokenizer, [source], "auto", "auto")
    for calls in [CALLS[:num_calls], *([call] for call in CALLS)]:
        prompt_end, answer = written(source, calls, content)
        parser = chat_format.parser(prompt_end, tools=TOOLS)
        detokenizer = Detokenizer(tokenizer, tags=chat_format.tags)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        news = [parser.push(detokenizer.push(ids[i : i + size])) for i in range(0, len(ids), size)]
        news += [parser.push(detokenizer.flush()), parser.flush()]
        found = joined(call for one in news for call in one.tool_calls)
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls
        assert "".join(one.text for one in news) == content
        assert "".join(one.reasoning for one in news) == ""


def is_allowed(vocabulary, grammar: str, ids: list[int]) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("path", TEMPLATES)
def test_grammars_allow_a_templates_own_calls_and_no_wrong_arguments(
    load_tokenizer, load_vocabulary, path
):
    folder = path.split("/")[0]
    tokenizer, vocabulary = load_tokenizer(folder), load_vocabulary(folder)
    source = (SHARED / path).read_text(encoding="utf8")
    num_calls, content = TEMPLATES[path]
    chat_format = choose_chat_format(tokenizer, [source], "auto", "auto")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    rule = ToolRule(names=("weather", "now"))
    named = ToolRule(names=("now",), is_named=True)
    for said, tools, forced in (("", TOOLS, rule), ("", TOOLS, named), (content, strict, None)):
        calls = CALLS[1:] if forced is named else CALLS[:num_calls]
        prompt_end, answer = written(source, calls, said)
        start = chat_format.answer_start(prompt_end)
        grammar = output_grammar(tokenizer, start, None, tools, forced)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        assert is_allowed(vocabulary, grammar, ids), (forced, answer)
        wrong = answer.replace('"days": 2', '"days": "two"').replace("now", "later")
        wrong_ids = tokenizer.encode(wrong, add_special_tokens=False)
        assert wrong != answer and not is_allowed(vocabulary, grammar, wrong_ids), wrong
        closing = "Hm.</think>" if start.is_inside else ""
        free = tokenizer.encode(f"{closing}I call nothing.", add_special_tokens=False)
        is_open = forced is None and chat_format.reasoning != "harmony"  # which needs its header
        assert is_allowed(vocabulary, grammar, free) == is_open


def test_all_real_templates_are_tried():
    paths = {str(path.relative_to(SHARED)) for path in SHARED.glob("*/*.jinja")}
    if not paths:
        pytest.skip("no shared templates beside this checkout")
    assert paths == set(TEMPLATES)
