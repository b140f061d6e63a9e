"""Greedy answers of a small trained model on this GPU in bf16, against those of the CPU in fp32.

    PYTHONPATH=src python tests/gpu/texts_check.py [FOLDER ...]

Of every skill that the model has learned some prompts. An answer may leave the CPU's only where the
best two tokens there are closer than bf16 can tell. Without folders: all siblings. Without a GPU
bf16 runs on the CPU, too, which tries the check.
"""

import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, RequestOutput, SamplingParams
from penstock.types.request import ChatOptions

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = (ROOT / "src/penstock/hub/tiny", *sorted((ROOT / "tests/siblings").iterdir()))
NUM_EACH, NUM_TOKENS = 8, 96  # prompts of a skill, tokens of an answer
MAX_GAP = 0.25  # two steps between bf16 numbers from 16 to 32, where the best logits are
MIN_EQUAL = 0.8  # of the answers: rounding changes some, a broken kernel most


def examples(folder: Path) -> list[dict[str, Any]]:
    taken: Counter[str] = Counter()
    found = []
    for line in (folder / "skills.jsonl").read_text().splitlines():
        example = json.loads(line)
        taken[example["skill"]] += 1
        if taken[example["skill"]] <= NUM_EACH:
            found.append(example)
    return found


def answers(folder: Path, asked: list[dict[str, Any]], **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2)
    options = [
        ChatOptions(
            template_kwargs=one.get("chat_template_kwargs", {}), tools=tuple(one.get("tools", ()))
        )
        for one in asked
    ]
    # Several may share the GPU, so none may take all memory that is left.
    small: dict[str, Any] = {
        "max_seq_len": 1024,
        "max_batch_size": 64,
        "kv_cache_config": {"max_tokens": 65536},
    }
    with LLM(str(folder), **small, **settings) as llm:
        found = llm.chat([one["messages"] for one in asked], params, options)
    assert isinstance(found, list)
    return found


def check(folder: Path) -> bool:
    asked = examples(folder)
    threads = max(1, (os.cpu_count() or 1) // 4)
    truth = answers(folder, asked, device="cpu", dtype="float32", num_threads=threads)
    found = answers(folder, asked, device="auto", dtype="bfloat16")
    return agree(f"{folder.name}, beside the CPU", asked, found, truth)


def agree(
    name: str, asked: list[dict[str, Any]], found: list[RequestOutput], truth: list[RequestOutput]
) -> bool:
    """Whether most answers are the same, and the others part at a tie."""
    num_equal = num_wrong = 0
    for example, ours, theirs in zip(asked, found, truth, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        ids, expected = (list(output.outputs[0].token_ids) for output in (ours, theirs))
        if ids == expected:
            num_equal += 1
            continue
        pairs = enumerate(itertools.zip_longest(ids, expected))
        at = next(place for place, (one, other) in pairs if one != other)
        best = theirs.outputs[0].logprobs[min(at, len(expected) - 1)].top
        first, second = sorted((score for _, score in best), reverse=True)[:2]
        is_tie = first - second <= MAX_GAP
        num_wrong += not is_tie
        what = f"{example['skill']}: {example['messages'][-1]['content']!r}"
        print(f"{'ok  ' if is_tie else 'FAIL'} token {at}, gap {first - second:.3f}: {what}")
    ok = not num_wrong and num_equal >= MIN_EQUAL * len(asked)
    print(
        f"{'ok  ' if ok else 'FAIL'} {name}: {num_equal} of {len(asked)} answers are the same; "
        f"{num_wrong} differ without a tie",
        flush=True,
    )
    return ok


def main() -> None:
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    results = [check(Path(folder)) for folder in sys.argv[1:] or SIBLINGS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
