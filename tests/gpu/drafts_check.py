"""Greedy answers with every drafter on this GPU, against those of the same GPU without.

    PYTHONPATH=src python tests/gpu/drafts_check.py [FOLDER ...]

In bf16, captured graphs, all prompts at once and two steps in flight. Answers may part only where
the best two tokens are closer than bf16 can tell. Without a GPU it runs on the CPU.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from texts_check import SIBLINGS, agree, answers, examples

from penstock import RequestOutput

ROOT = Path(__file__).resolve().parents[2]
TINY = SIBLINGS[0]
DRAFTERS = ROOT / "tests/drafters"
EAGLE3 = {
    "decoding_type": "Eagle3",
    "speculative_model": str(DRAFTERS / "llama_eagle3"),
    "eagle3_layers_to_capture": [1, 2, 4],
}
SMALL = {"decoding_type": "Draft_Target", "speculative_model": str(DRAFTERS / "llama_small")}
HEADS = {"deepseek_v3", "qwen3_next"}  # with one for MTP


def methods(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"decoding_type": "NGram"}]
    if folder.name in HEADS:
        return [*found, {"decoding_type": "MTP"}]
    if folder == TINY:
        return [*found, EAGLE3, SMALL]
    return [*found, {"decoding_type": "Draft_Target", "speculative_model": str(TINY)}]


def tokens_per_step(found: list[RequestOutput]) -> float:
    outputs = [one.outputs[0] for one in found]
    steps = sum(len(one.token_ids) / one.avg_decoded_tokens_per_iter for one in outputs)
    return sum(len(one.token_ids) for one in outputs) / steps


def check(folder: Path) -> bool:
    asked = examples(folder)
    common: dict[str, Any] = {"device": "auto", "dtype": "bfloat16"}
    truth = answers(folder, asked, **common)
    is_ok = True
    for method in methods(folder):
        drafting = {"max_draft_len": 3, "adaptive_draft_len": False} | method
        found = answers(folder, asked, speculative_config=drafting, **common)
        name = f"{folder.name}, {method['decoding_type']}"
        name += f", {tokens_per_step(found):.2f} tokens a step"
        is_ok &= agree(name, asked, found, truth)
    return is_ok


def main() -> None:
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    results = [check(Path(folder).resolve()) for folder in sys.argv[1:] or SIBLINGS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
