"""`Case`: one situation in which `kernels.tuning` times a launch config, and how it is timed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Launch = Callable[[], object]

L2_BYTES = 256 << 20  # more than any, so that nothing is found in it
_BUDGET_MS = 10.0  # of one timing


@dataclass(frozen=True, slots=True)
class Case:
    """Launches that follow each other in a CUDA graph, as in a layer."""

    name: str
    roofline_us: float | None
    launches: Callable[[Any], list[Launch]]
    output: Callable[[Any], Tensor]  # the result of one launch


def graph_us(launches: Sequence[Launch]) -> float:
    """Mean time of one of them when all follow each other in one graph."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay_ms(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / times

    replay_ms(1)
    repeats = max(2, int(_BUDGET_MS / max(replay_ms(1), 1e-3)))
    return replay_ms(repeats) / len(launches) * 1e3
