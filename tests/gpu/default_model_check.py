"""The default model's greedy answers on this GPU in bf16, against those of a CPU.

    python tests/gpu/default_model_check.py ANSWERS.json [MODEL]       on a CPU: writes the file
    python tests/gpu/default_model_check.py ANSWERS.json MODEL         on a GPU: compares

100 chat prompts. An answer may leave the CPU's where its best two tokens are closer than bf16 can
tell: MAX_GAP is two steps between bf16 numbers from 16 to 32, where the best logits are.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams

NUM_TOKENS = 64
MAX_GAP = 0.25
MIN_EQUAL = 0.5  # of the answers: rounding changes some, a broken kernel all
QUESTIONS = (
    "What is the capital of {}?",
    "Name three things one finds in {}.",
    "Write a short sentence about {}.",
    "Why do people travel to {}?",
    "Explain to a child what {} is.",
)
SUBJECTS = (
    "France", "Japan", "a forest", "the sea", "a library", "Egypt", "a kitchen", "the moon",
    "Brazil", "a school", "Norway", "a desert", "a harbour", "Peru", "a garden", "the night sky",
    "a factory", "India", "a mountain", "an island",
)  # fmt: skip


def answers(model: str, dtype: str) -> list[dict[str, Any]]:
    texts = [q.format(subject) for subject, q in itertools.product(SUBJECTS, QUESTIONS)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2)
    with LLM(model=model, dtype=dtype, max_seq_len=512, max_batch_size=32) as llm:
        outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    found = []
    for text, output in zip(texts, outputs, strict=True):
        answer = output.outputs[0]
        tops = [
            sorted((score for _, score in place.top), reverse=True) for place in answer.logprobs
        ]
        found.append(
            {
                "text": text,
                "prompt": list(output.prompt_token_ids),
                "ids": list(answer.token_ids),
                "gaps": [top[0] - top[1] for top in tops],
            }
        )
    return found


def compare(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    num_equal, wrong = 0, []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["prompt"] == theirs["prompt"], ours["text"]
        if ours["ids"] == theirs["ids"]:
            num_equal += 1
            continue
        pairs = enumerate(itertools.zip_longest(ours["ids"], theirs["ids"]))
        at = next(i for i, (a, b) in pairs if a != b)
        gap = theirs["gaps"][min(at, len(theirs["gaps"]) - 1)]
        print(f"{'ok  ' if gap <= MAX_GAP else 'FAIL'} token {at}, gap {gap:.3f}: {ours['text']}")
        if gap > MAX_GAP:
            wrong.append(ours["text"])
    print(f"{num_equal} of {len(found)} answers are the CPU's; {len(wrong)} differ without a tie")
    sys.exit(bool(wrong) or num_equal < MIN_EQUAL * len(found))


def main() -> None:
    file, model = Path(sys.argv[1]), (sys.argv[2:] or ["smollm2"])[0]
    if torch.cuda.is_available():
        compare(json.loads(file.read_text()), answers(model, "bfloat16"))
    else:
        file.write_text(json.dumps(answers(model, "float32")))


if __name__ == "__main__":
    main()
