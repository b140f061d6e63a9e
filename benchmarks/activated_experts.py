"""How many experts of a layer a decode step activates, by the number of sequences.

The engine runs in this process, without CUDA graphs (which also count the rows that fill them up);
the layers' own counters are read after every turn of its loop.
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import Row, model_folder, prompts

if TYPE_CHECKING:
    from local_engine import LocalEngine
    from torch import Tensor

PROMPT_IDS, NUM_STEPS = 64, 24
_MAX_TURNS = 1000


def count_activated(row: Row, batches: Sequence[int]) -> dict[int, float]:
    """Mean of layers and steps, for each number of sequences that decode together."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
    from local_engine import LocalEngine

    num_new = NUM_STEPS + 8 + 2 * max(batches) * PROMPT_IDS // 2048
    settings = row.engine_settings(PROMPT_IDS + num_new, max(batches))
    settings["max_batch_size"], settings["cuda_graph_config"] = max(batches), None
    settings["kv_cache_config"]["max_tokens"] = max(batches) * (PROMPT_IDS + num_new + 64)
    found = {}
    with model_folder(row) as folder:
        engine = LocalEngine(folder, **settings)
        for batch in sorted(batches):
            vocab = row.config["vocab_size"]
            for seed, prompt in enumerate(prompts(batch, PROMPT_IDS, vocab, batch)):
                engine.submit(
                    prompt, num_new, ignore_eos=True, temperature=row.temperature, seed=seed
                )
            found[batch] = _mean_of_steps(engine, batch)
            engine.run()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _mean_of_steps(engine: "LocalEngine", batch: int) -> float:
    """Over turns that ran one step, in which every sequence had one token."""
    loads = _loads(engine)
    before_LS, numbers = loads.read(), []
    for _ in range(_MAX_TURNS):
        engine.turn()
        after_LS = loads.read()
        new_LS = after_LS - before_LS
        before_LS = after_LS
        if (new_LS.sum(1) == batch * loads.num_active).all():
            numbers.append((new_LS > 0).sum(1).double().mean().item())
        if len(numbers) == NUM_STEPS or not engine.engine.scheduler.has_work:
            break
    assert numbers, f"no step decoded {batch} sequences"
    return sum(numbers) / len(numbers)


class _Loads:
    def __init__(self, counters: "list[Tensor]", num_active: int) -> None:
        self._counters, self.num_active = counters, num_active

    def read(self) -> "Tensor":
        import torch

        return torch.stack(self._counters).cpu()


def _loads(engine: "LocalEngine") -> _Loads:
    from penstock.layers.moe import MoE

    model = engine.runner._model
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    assert layers, "the model has no experts"
    return _Loads([layer.experts.load_S for layer in layers], layers[0].routing.num_active)
