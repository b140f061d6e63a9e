"""Whether trees of drafts would pay: what heads that we have trained put in which place.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/draft_trees.py [--each 10] [--tokens 60]

Heads of `tests/drafters` and `tests/siblings`, held-out prompts of `skills.jsonl`. A head walks the
path of tokens that the model goes, and at each of `DEPTH` places it is noted which choice of the
head the right token is. `noise`: weaker heads, normal noise on their logits, so much that of few
prompts the first choice of the first place is right as often as told. `sampled`: the model draws at
temperature 1.5.

A node of a tree is a path of choices (2nd, then 1st, ...); the best static tree of N nodes has the
N most frequent ones. It is chosen by every other step and judged by the rest, as are chains. Their
cost is that of steps of an 8B shape in BF16 on an H200 by tokens, and of an Eagle3 head, which runs
once a level (docs/speculative.md); a mask within attention is taken to cost nothing. Printed is the
best chain and the best tree of all, in tokens per second over plain decoding.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

from local_engine import LocalEngine
from test_drafted_texts import METHODS, engine_of, prompts
from torch import Tensor

from penstock.ipc.messages import Submit
from penstock.types.request import Request, request_id
from penstock.types.sampling import SamplingParams

DEPTH, MOST_CHOICES, MOST_NODES = 6, 8, 63
HEADS = ("eagle3", "mtp of deepseek", "mtp of qwen3-next")
# ms of a step by its tokens, without what drafts; a pass of the head is a share of it.
TOKENS = (1, 4, 32, 128, 256, 1024)
STEP_MS = (3.86, 4.32, 4.77, 7.2, 10.8, 34.0)
HEAD_SHARE = 0.063
BATCHES = (1, 8, 32)

Path_ = tuple[int, ...]  # the choice at each place, 0 the first


class Walk:
    """In place of a head's `best`: notes the choice that the right token is, and takes that one."""

    def __init__(self, scores: Callable[[Tensor], Tensor], noise: float) -> None:
        self._scores, self._noise = scores, noise
        self._generator = torch.Generator().manual_seed(1)
        self.text: list[int] = []
        self.at = 0  # of the next token to be named
        self.found: list[tuple[int, list[int]]] = []  # from which token on, and the choices

    def __call__(self, x_1D: Tensor) -> Tensor:
        if not len(x_1D):  # a chunk that does not reach the end of its prompt
            return torch.zeros(0, dtype=torch.int64)
        scores_V = self._scores(x_1D)[0].float()
        scores_V = scores_V + self._noise * torch.randn(scores_V.shape, generator=self._generator)
        right = self.text[self.at] if self.at < len(self.text) else 0
        self.found[-1][1].append(int((scores_V > scores_V[right]).sum()))
        self.at += 1
        return torch.tensor([right])


def walked(name: str, asked: argparse.Namespace, noise: float, **sampling: Any) -> list[Path_]:
    """Of each step the choices along the path that the model went."""
    folder, drafting, _ = METHODS[name]
    texts = prompts(folder, asked.each)
    plain = engine_of(folder, None, 1)
    drafting = drafting | {"max_draft_len": DEPTH, "adaptive_draft_len": False}
    engine = engine_of(folder, drafting, 1)
    drafter = engine.loop._executor._runner.drafting.drafter
    head, model = drafter._head, engine.loop._executor._runner._model
    targets_C = getattr(head, "targets_C", None)  # its own vocabulary, in the model's ids

    def scores(x_1D: Tensor) -> Tensor:
        if targets_C is None:
            return model.logits(x_1D)
        scores_1V = torch.full((1, engine.info.vocab_size), -torch.inf)
        return scores_1V.index_copy_(1, targets_C, head.head(x_1D).float())

    drafter._best = walk = Walk(scores, noise)
    draft = drafter.draft

    def noting(step: Any) -> Tensor:
        walk.at = int(step.newest_N[0]) + 1 if len(step.newest_N) else 0
        walk.found.append((walk.at, []))
        return draft(step)

    drafter.draft = noting
    paths: list[Path_] = []
    for number, text in enumerate(texts):
        options = {"temperature": 0.0, "seed": number} | sampling
        output = _said(plain, text, asked.tokens, options)
        walk.text, walk.found = [*text, *output], []
        assert _said(engine, text, asked.tokens, options) == output
        # Without those that go beyond the output.
        whole = [ranks for at, ranks in walk.found if at + DEPTH <= len(walk.text)]
        paths += [tuple(ranks) for ranks in whole if len(ranks) == DEPTH]
    return paths


def _said(engine: LocalEngine, text: list[int], num_tokens: int, options: Any) -> list[int]:
    request = Request(
        id=request_id(3, engine.counters.steps),
        prompt_ids=np.array(text, np.int32),
        sampling=SamplingParams(**options),
        max_tokens=num_tokens,
        stop_ids=tuple(engine.info.eos_token_ids),
    )
    engine.inbox.append(Submit(requests=(request,)))
    engine.run()
    return engine.tokens(request.id)


def step_ms(num_tokens: float) -> float:
    return float(np.interp(num_tokens, TOKENS, STEP_MS))


def rate(nodes: list[Path_], judged: list[Path_], batch: int) -> float:
    """Tokens a millisecond of each sequence that feeds this tree."""
    wanted = set(nodes)
    kept = sum(path[:length] in wanted for path in judged for length in range(1, DEPTH + 1))
    took = step_ms(batch * (1 + len(nodes)))
    parents = Counter(len(node) for node in {node[:-1] for node in nodes})
    took += sum(HEAD_SHARE * step_ms(batch * num) for num in parents.values())
    return (1 + kept / len(judged)) / took


def compared(paths: list[Path_]) -> list[str]:
    fitted, judged = paths[::2], paths[1::2]
    seen = Counter(
        path[:length]
        for path in fitted
        for length in range(1, DEPTH + 1)
        if max(path[:length]) < MOST_CHOICES
    )
    by_count = sorted(seen, key=lambda node: (-seen[node], len(node)))[:MOST_NODES]
    chains = [[(0,) * length for length in range(1, most + 1)] for most in range(1, DEPTH + 1)]
    trees = [by_count[:num] for num in range(1, len(by_count) + 1)]
    lines = []
    for batch in BATCHES:
        plain = 1 / step_ms(batch)
        best_chain, best_tree = (
            max(kind, key=lambda nodes: rate(nodes, fitted, batch)) for kind in (chains, trees)
        )
        gains = [rate(nodes, judged, batch) / plain for nodes in (best_chain, best_tree)]
        lines.append(
            f"  batch {batch:3}: chain of {len(best_chain)} x {gains[0]:.2f}, tree of "
            f"{len(best_tree)} nodes x {gains[1]:.2f}: {gains[1] / gains[0] - 1:+.1%}"
        )
    return lines


def places(paths: list[Path_]) -> str:
    """How often each choice is right, of those that have come there by right ones."""
    shown = []
    for place in range(3):
        ranks = [path[place] for path in paths]
        shares = [ranks.count(choice) / len(ranks) for choice in range(4)]
        shown.append(" ".join(f"{share:4.0%}" for share in shares))
    return " | ".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=10, help="prompts of each skill")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--heads", nargs="+", default=HEADS, choices=HEADS)
    parser.add_argument("--right", nargs="*", type=float, default=[0.7, 0.6, 0.5])
    asked = parser.parse_args()
    for name in asked.heads:
        kinds: list[tuple[str, float, dict[str, float]]] = [
            ("greedy", 0.0, {}),
            ("sampled", 0.0, {"temperature": 1.5}),
        ]
        kinds += [(f"noise for {right:.0%}", right, {}) for right in asked.right]
        for kind, right, sampling in kinds:
            paths = (
                walked(name, asked, 0.0, **sampling) if not right else weaker(name, asked, right)
            )
            print(f"{name}, {kind}: {len(paths)} steps; 1st to 4th choice at places 1, 2, 3:")
            print(" ", places(paths))
            print(*compared(paths), sep="\n", flush=True)


def weaker(name: str, asked: argparse.Namespace, right: float) -> list[Path_]:
    """With noise, found by halving, that leaves the first choice of the first place so often."""
    few = argparse.Namespace(each=2, tokens=asked.tokens)
    low, high = 0.0, 16.0
    for _ in range(6):
        noise = (low + high) / 2
        paths = walked(name, few, noise)
        share = sum(path[0] == 0 for path in paths) / len(paths)
        low, high = (noise, high) if share > right else (low, noise)
    return walked(name, asked, (low + high) / 2)


if __name__ == "__main__":
    main()
