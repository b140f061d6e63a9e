"""Two ranks on one GPU give the tokens of one rank.

    PYTHONPATH=src python tests/gpu/tp_check.py [cp]     cp: they share sequences, not heads

NCCL refuses two ranks on a device, so they meet over gloo, and without CUDA graphs. What is checked
is everything else: sharded weights, Triton attention on half of the heads, halves of all experts or
half of them, plans sent to a second process, tokens handed from the sampling rank. fp32, so that
the tokens must be equal.
"""

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fixtures")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])

from gloo_worker import use_gloo  # noqa: E402
from local_engine import LocalEngine  # noqa: E402

from penstock.engine import engine as engine_module  # noqa: E402
from penstock.ipc.process import Child  # noqa: E402
from penstock.runtime import local_ranks  # noqa: E402


def two_ranks_on_one_gpu() -> None:
    use_gloo()
    probe = engine_module.probe
    two = replace(probe(), num_devices=2)

    def child(module: str, *args: Any, **kwargs: Any) -> Child:
        return Child("gloo_worker", *args, **kwargs)

    patch.object(engine_module, "probe", lambda: two).start()
    patch.object(local_ranks, "Child", child).start()


def main() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    two_ranks_on_one_gpu()
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        mlp_only_layers=[1], num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        initializer_range=0.05, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    prompts = [torch.randint(0, 2048, (n,)).tolist() for n in (5, 64, 300)]
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        start = partial(
            LocalEngine, folder, dtype="float32", max_num_tokens=128, cuda_graph_config=None,
            kv_cache_config={"max_tokens": 8192},
        )  # fmt: skip
        whole = start()
        expected = whole.generate(prompts, 64)
        (all_bytes,) = whole.info.rank_weight_bytes
        strategy = "context" if "cp" in sys.argv else "tensor"
        for ep_size in (1, 2):
            sizes = {f"{strategy}_parallel_size": 2, "moe_expert_parallel_size": ep_size}
            ranks_of_two = start(**sizes)
            found = ranks_of_two.generate(prompts, 64)
            num_bytes = ranks_of_two.info.rank_weight_bytes
            ranks_of_two.engine._ranks.stop()
            dist.destroy_process_group()
            print(f"weights: {all_bytes}, per rank: {num_bytes}")
            assert found == expected, "two ranks give other tokens than one"
            share = 0.55 if strategy == "tensor" else 0.7  # attention is on both
            assert max(num_bytes) < share * all_bytes, "a rank holds more than its share"
            print(f"ok   two ranks, {strategy} parallel, ep_size {ep_size}, give the tokens of one")


if __name__ == "__main__":
    main()
