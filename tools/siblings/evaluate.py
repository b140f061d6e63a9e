"""Scores a sibling on held-out chats with transformers' greedy generation.

Usage: evaluate.py FOLDER [--per-skill N] [--seed N] [--show N]
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from architectures import ARCHITECTURES
from chat_format import answer_text, prompt
from corpus import SKILLS, Example, held_out_examples, score
from tokenizer import PAD, token_id
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

MAX_NEW_TOKENS = 72  # the longest right answer has 54


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Tokenizer,
    format: str,
    examples: list[Example],
    batch_size: int = 1024,
) -> list[str]:
    """What the model says to each example, in the form that `corpus.score` reads."""
    pad_id = token_id(tokenizer, PAD)
    prompts = [tokenizer.encode(prompt(format, example)).ids for example in examples]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    said = [""] * len(prompts)
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
            said[i] = answer_text(format, text)
    return said


def evaluate(
    model: PreTrainedModel, tokenizer: Tokenizer, format: str, seed: int, num_per_skill: int
) -> tuple[dict[str, float], list[tuple[Example, str]]]:
    """The share of exactly right answers per skill, and the wrong ones with what was said."""
    examples = held_out_examples(seed, num_per_skill)
    was_training = model.training
    model.eval()
    said = answers(model, tokenizer, format, examples)
    model.train(was_training)
    num_right = dict.fromkeys(SKILLS, 0)
    wrong = []
    for example, text in zip(examples, said, strict=True):
        if score(example.skill, example.expected, text):
            num_right[example.skill] += 1
        else:
            wrong.append((example, text))
    return {skill: right / num_per_skill for skill, right in num_right.items()}, wrong


def table(scores: dict[str, float]) -> str:
    rows = [f"| {skill} | {share:.1%} |" for skill, share in scores.items()]
    return "\n".join(["| skill | held-out exact match |", "| --- | ---: |", *rows])


def load(folder: Path, device: torch.device) -> tuple[PreTrainedModel, Tokenizer, str]:
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
    for skill in SKILLS:
        shown = [(example, text) for example, text in wrong if example.skill == skill]
        for example, text in shown[: args.show]:
            asked = example.messages[-2]["content"]
            print(f"{skill}: {asked!r}\n  expected {example.expected!r}\n  said {text!r}")


if __name__ == "__main__":
    main()
