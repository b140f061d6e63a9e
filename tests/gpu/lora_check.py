"""Adapters on a GPU against transformers with the adapter merged by hand.

    PYTHONPATH=src python tests/gpu/lora_check.py [--device cpu]

fp32, CUDA graphs and eager steps, prompts of several lengths that arrive while others decode, more
adapters than slots, some requests without one: greedy tokens are transformers' own, except where
its two best logits are nearly equal.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

from local_engine import LocalEngine  # noqa: E402
from lora_models import ALL, make_adapter, merge  # noqa: E402

from penstock.ipc.messages import Submit  # noqa: E402
from penstock.types.lora_request import adapter_of  # noqa: E402
from penstock.types.request import Request, request_id  # noqa: E402
from penstock.types.sampling import SamplingParams  # noqa: E402

NUM_ADAPTERS, NUM_SLOTS, NUM_TOKENS = 6, 4, 24
LENGTHS = (5, 70, 300, 17, 130, 33)
CLOSE = 1e-3  # of logits around one: fp32 sums in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as root:
        failed = check(Path(root), device)
    sys.exit(1 if failed else 0)


def check(root: Path, device: str) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.05, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(root / "model")
    model.to(device)
    adapters = [
        make_adapter(
            root / f"a{i}", model.cpu(), ALL if i % 2 else ALL[:3], rank=(4, 16, 24)[i % 3], seed=i
        )
        for i in range(NUM_ADAPTERS)
    ]
    model.to(device)
    asked = [
        (torch.randint(2048, (length,), generator=torch.Generator().manual_seed(n)).tolist(), path)
        for n, (length, path) in enumerate(
            (LENGTHS[n % len(LENGTHS)], [None, *adapters][n % (NUM_ADAPTERS + 1)])
            for n in range(21)
        )
    ]
    failed = 0
    for graphs in (None, {"max_batch_size": 16, "enable_padding": True}):
        engine = LocalEngine(
            str(root / "model"), dtype="float32", device=device, skip_tokenizer_init=True,
            max_batch_size=16, max_num_tokens=256, max_seq_len=512, cuda_graph_config=graphs,
            lora_config={"max_loras": NUM_SLOTS, "max_lora_rank": 32},
            kv_cache_config={"max_tokens": 16384},
        )  # fmt: skip
        ids = []
        for number, (prompt, path) in enumerate(asked):
            ids.append(submit(engine, number, prompt, path))
            for _ in range(3):
                engine.turn()
        engine.run()
        how = "eager" if graphs is None else "graphs"
        for path in [None, *adapters]:
            if path is not None:
                merge(model, path)
            for number, (prompt, own) in enumerate(asked):
                if own is path:
                    wrong = first_difference(model, prompt, engine.tokens(ids[number]))
                    name = "none" if path is None else path.name
                    failed += wrong is not None
                    said = "ok  " if wrong is None else "FAIL"
                    print(
                        f"{said} {how} request {number}, adapter {name} {wrong or ''}", flush=True
                    )
            if path is not None:
                merge(model, path, -1.0)
        del engine
        if device == "cuda":
            torch.cuda.empty_cache()
    return failed


def submit(engine: LocalEngine, number: int, prompt: list[int], path: Path | None) -> int:
    adapter = None if path is None else adapter_of(path.name, str(path))
    request = Request(
        id=request_id(1, 1000 + number),
        prompt_ids=np.array(prompt, np.int32),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=NUM_TOKENS,
        adapter=adapter,
        cache_keys=() if adapter is None else ("adapter", adapter.id, adapter.name),
    )
    engine.inbox.append(Submit(requests=(request,)))
    return request.id


@torch.inference_mode()
def first_difference(model, prompt: list[int], tokens: list[int]) -> str | None:
    """Where a token is clearly not the likeliest one behind what came before it."""
    if len(tokens) != NUM_TOKENS:
        return f"{len(tokens)} tokens came"
    device = next(model.parameters()).device
    logits = model(torch.tensor([prompt + tokens[:-1]], device=device)).logits[0].float()
    logits = logits[len(prompt) - 1 :]
    short = logits.amax(1) - logits[range(NUM_TOKENS), tokens]
    if (worst := short.max().item()) < CLOSE:
        return None
    return f"token {int(short.argmax())} is {worst:.3g} below the likeliest"


if __name__ == "__main__":
    main()
