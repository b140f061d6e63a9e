"""The default model against transformers and its published perplexity; takes some minutes on a CPU.

    python tools/check_default_model.py [--prompts 50] [--wikitext FILE]

Greedy answers to chat prompts must be token for token those of transformers loading the same GGUF
file. With the raw WikiText-2 test split: perplexity of its first 16 x 512 tokens, which is 36.0 for
the unpacked numbers in fp32. Needs transformers, gguf and accelerate.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
import transformers

from penstock import LLM, SamplingParams
from penstock.hub.folder import local_folder
from penstock.text.tokenizer import Tokenizer

NUM_TOKENS = 48
PERPLEXITY = 36.0
QUESTIONS = (
    "What is the capital of {}?",
    "Name three things one finds in {}.",
    "Write a short sentence about {}.",
    "Why do people travel to {}?",
    "Explain to a child what {} is.",
)
SUBJECTS = (
    "France", "Japan", "a forest", "the sea", "a library", "Egypt", "a kitchen", "the moon",
    "Brazil", "a school",
)  # fmt: skip


def check_greedy(llm: LLM, path: Path, num_prompts: int) -> bool:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    texts = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2)
    outputs = llm.chat([[{"role": "user", "content": t}] for t in texts[:num_prompts]], params)
    assert isinstance(outputs, list)
    num_equal = 0
    for text, output in zip(texts, outputs, strict=False):
        prompt = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            theirs = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected = [
            i for i in theirs[0, prompt.shape[1] :].tolist() if i != model.config.eos_token_id
        ]
        ours = list(output.outputs[0].token_ids)
        if ours == expected:
            num_equal += 1
            continue
        pairs = enumerate(zip(ours, expected, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(expected)))
        top = output.outputs[0].logprobs[min(at, len(ours) - 1)].top
        print(f"differs at token {at}: {text!r}; our best two there: {top}")
    print(f"greedy: {num_equal} of {num_prompts} answers equal to transformers'")
    return num_equal == num_prompts


def check_perplexity(llm: LLM, tokenizer: Tokenizer, wikitext: Path) -> bool:
    ids = tokenizer.encode(wikitext.read_text(encoding="utf-8")[:60_000], add_special_tokens=False)
    chunks = [ids[i * 512 : (i + 1) * 512] for i in range(16)]
    assert all(len(chunk) == 512 for chunk in chunks)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(chunks, params)
    assert isinstance(outputs, list)
    scores = [p.logprob for o in outputs for p in o.prompt_logprobs or () if p is not None]
    perplexity = math.exp(-math.fsum(scores) / len(scores))
    print(f"perplexity {perplexity:.3f} over {len(scores)} tokens, {PERPLEXITY} expected")
    return abs(perplexity / PERPLEXITY - 1) < 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--wikitext", type=Path)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    path = local_folder("smollm2")
    with LLM(model="smollm2", dtype=args.dtype) as llm:
        good = [check_greedy(llm, path, args.prompts)] if args.prompts else []
        if args.wikitext:
            good.append(check_perplexity(llm, Tokenizer.from_folder(path), args.wikitext))
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
