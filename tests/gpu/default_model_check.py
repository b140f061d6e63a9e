"""The default model's greedy answers on this GPU in bf16, against those of a CPU in fp32.

    python tests/gpu/default_model_check.py ANSWERS.json [MODEL]       on a CPU: writes the file
    python tests/gpu/default_model_check.py ANSWERS.json MODEL         on a GPU: compares

100 chat prompts. An answer may leave the CPU's where its best two tokens are closer than bf16 can
tell. How close that is transformers shows: the file also has by how much it moves such two tokens
against each other when it computes the same answers in bf16, and how many answers it then has.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams
from penstock.hub.folder import local_folder

NUM_TOKENS = 64
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
    assert isinstance(outputs, list)
    found = []
    for text, output in zip(texts, outputs, strict=True):
        answer = output.outputs[0]
        tops = [
            sorted(place.top, key=lambda one: one[1], reverse=True) for place in answer.logprobs
        ]
        found.append(
            {
                "text": text,
                "prompt": list(output.prompt_token_ids),
                "ids": list(answer.token_ids),
                "best": [[token for token, _ in top[:2]] for top in tops],
                "gaps": [top[0][1] - top[1][1] for top in tops],
            }
        )
    return found


def rounding(model: str, expected: list[dict[str, Any]]) -> dict[str, float]:
    """What computing in bf16 does to these answers where transformers computes."""
    from transformers import AutoModelForCausalLM

    file = local_folder(model)
    low = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    ).eval()
    num_equal, largest = 0, 0.0
    for answer in expected:
        ids = torch.tensor([answer["prompt"] + answer["ids"][:-1]])
        with torch.inference_mode():
            logits_SV = low(ids).logits[0, len(answer["prompt"]) - 1 :].float()
        for place, logits_V in enumerate(logits_SV):
            best, second = answer["best"][place]
            gap = float(logits_V[best] - logits_V[second])
            largest = max(largest, abs(gap - answer["gaps"][place]))
        num_equal += logits_SV.argmax(1).tolist() == answer["ids"]
    return {"num_equal": num_equal, "gap": largest}


def compare(
    expected: list[dict[str, Any]], found: list[dict[str, Any]], rounding: dict[str, float]
) -> None:
    num_equal, wrong = 0, []
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["prompt"] == theirs["prompt"], ours["text"]
        if ours["ids"] == theirs["ids"]:
            num_equal += 1
            continue
        pairs = enumerate(itertools.zip_longest(ours["ids"], theirs["ids"]))
        at = next(i for i, (a, b) in pairs if a != b)
        gap = theirs["gaps"][min(at, len(theirs["gaps"]) - 1)]
        is_tie = gap <= rounding["gap"]
        print(f"{'ok  ' if is_tie else 'FAIL'} token {at}, gap {gap:.3f}: {ours['text']}")
        if not is_tie:
            wrong.append(ours["text"])
    print(
        f"{num_equal} of {len(found)} answers are the CPU's (transformers in bf16: "
        f"{rounding['num_equal']}); {len(wrong)} differ without a tie, which is a gap of up to "
        f"{rounding['gap']:.3f}"
    )
    sys.exit(bool(wrong) or num_equal < rounding["num_equal"])


def main() -> None:
    file, model = Path(sys.argv[1]), (sys.argv[2:] or ["smollm2"])[0]
    if torch.cuda.is_available():
        written = json.loads(file.read_text())
        compare(written["answers"], answers(model, "bfloat16"), written["rounding"])
    else:
        found = answers(model, "float32")
        written = {"answers": found, "rounding": rounding(model, found)}
        print(written["rounding"])
        file.write_text(json.dumps(written))


if __name__ == "__main__":
    main()
