"""Scores a sibling on held-out chats with transformers' greedy generation.

Usage: evaluate.py FOLDER [--per-skill N] [--seed N] [--show N]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from chat_format import parse_answer, prompt
from corpus import SKILLS, Answer, Example, held_out_examples, score
from mtp import draft_hidden
from packing import LEARNED, Encoder, encode, rows_by_width
from tokenizer import PAD, token_id
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MAX_NEW_TOKENS = 112  # a test holds every right answer to less


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Tokenizer,
    format: str,
    examples: list[Example],
    batch_size: int = 1024,
) -> list[Answer]:
    """What the model says to each example."""
    pad_id = token_id(tokenizer, PAD)
    prompts = [tokenizer.encode(prompt(format, example)).ids for example in examples]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    said = [Answer("")] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = max(len(prompts[i]) for i in chosen)
        padded = [[pad_id] * (longest - len(prompts[i])) + prompts[i] for i in chosen]
        real = [[0] * (longest - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen]
        generated = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(real, device=model.device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        texts = tokenizer.decode_batch(generated[:, longest:].tolist(), skip_special_tokens=False)
        for i, text in zip(chosen, texts, strict=True):
            said[i] = parse_answer(format, text)
    return said


def evaluate(
    model: PreTrainedModel, tokenizer: Tokenizer, format: str, seed: int, num_per_skill: int
) -> tuple[dict[str, float], list[tuple[Example, Answer]]]:
    """The share of exactly right answers per skill, and the wrong ones with what was said."""
    examples = held_out_examples(seed, num_per_skill)
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation(ARCHITECTURES[model.config.model_type].attention)
    said = answers(model, tokenizer, format, examples)
    model.set_attn_implementation(attention)
    model.train(was_training)
    num_right = dict.fromkeys(SKILLS, 0)
    wrong = []
    for example, answer in zip(examples, said, strict=True):
        if score(example.match, example.expected, answer):
            num_right[example.skill] += 1
        else:
            wrong.append((example, answer))
    return {skill: right / num_per_skill for skill, right in num_right.items()}, wrong


@torch.no_grad()
def draft_acceptance(
    model: Any, tokenizer: Tokenizer, format: str, seed: int, num_per_skill: int
) -> float:
    """How often the draft head names the main model's next choice, over the held-out answers."""
    docs = encode(Encoder(tokenizer), format, held_out_examples(seed, num_per_skill))
    num_same, num_all = 0, 0
    for rows in rows_by_width(docs, token_id(tokenizer, PAD)).values():
        learned_BS = torch.from_numpy(rows >= LEARNED).to(model.device)
        tokens_BS = torch.from_numpy((rows % LEARNED).astype("int64")).to(model.device)
        hidden_BSD = model.model(input_ids=tokens_BS, use_cache=False).last_hidden_state
        chosen_BS = model.lm_head(hidden_BSD).argmax(-1)
        drafted_BS = model.lm_head(draft_hidden(model, hidden_BSD, tokens_BS)).argmax(-1)
        same_BS = drafted_BS[:, :-2] == chosen_BS[:, 1:-1]  # both say the token two further
        num_same += int((same_BS & learned_BS[:, 2:]).sum())
        num_all += int(learned_BS[:, 2:].sum())
    return num_same / num_all


def table(scores: dict[str, float]) -> str:
    rows = [f"| {skill} | {share:.1%} |" for skill, share in scores.items()]
    return "\n".join(["| skill | held-out exact match |", "| --- | ---: |", *rows])


def load(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Tokenizer, str]:
    """A written checkpoint as transformers loads it, its experts computed densely."""
    architecture = ARCHITECTURES[AutoConfig.from_pretrained(folder).model_type]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation=architecture.attention,
        experts_implementation="dense",
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return model.to(device), tokenizer, architecture.format


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-skill", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers per skill")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores, wrong = evaluate(*load(args.folder, device), args.seed, args.per_skill)
    print(table(scores))
    print(wrong_answers(wrong, args.show))


def wrong_answers(wrong: list[tuple[Example, Answer]], num_per_skill: int) -> str:
    lines = []
    for skill in SKILLS:
        shown = [(example, answer) for example, answer in wrong if example.skill == skill]
        for example, answer in shown[:num_per_skill]:
            asked = example.messages[-2]["content"]
            lines.append(f"{skill}: {asked!r}\n  wanted {example.expected!r}\n  got {answer}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
