"""The servers of the recipes on this GPU: whole models with random weights, asked over HTTP.

    PYTHONPATH=src python tests/gpu/recipes_check.py [NAME ...] [--evaluation] [--tiny] [--verbose]

Each is started as its recipe says, on one GPU (tp_size and ep_size 1); DeepSeek-R1 with as many
layers as fit. It must answer completions and chat, alone and many at once, count its tokens, give
finite log-probabilities, hold weights of the expected size, and leave no error in its log. One line
each: start, memory, times. The tokenizer is a small one, so most of what comes back has no text.

--evaluation: the settings of the gpt-oss recipe for accuracy tests; those with steps of 133,120
tokens are asked with a prompt of 130,000.
--tiny: the same layers in small, on any machine.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT / "benchmarks")]

from roofline import roofline_of  # noqa: E402
from server_process import Server  # noqa: E402
from shapes import SHAPES, Row  # noqa: E402
from waiting import free_port  # noqa: E402

TOKENIZER = ROOT / "src" / "penstock" / "hub" / "tiny"
PENSTOCK = ("-m", "penstock", "serve")
TRTLLM = ("-c", "from penstock.cli.main import trtllm_serve; trtllm_serve()")
PROBLEM = re.compile(r"Traceback|^\d\d:\d\d:\d\d E ", re.MULTILINE)
WARNING = re.compile(r"^\d\d:\d\d:\d\d W \[\w+\] (.*)$", re.MULTILINE)
GIB = 2**30
MANY, MANY_TOKENS = 64, 32  # prompts at once, tokens of each
FEW = 6  # of them, for --tiny

_GRAPHS_720 = {"cuda_graph_config": {"enable_padding": True, "max_batch_size": 720}}
_STREAMS = {"stream_interval": 20, "num_postprocess_workers": 4}


def flags(batch: int, tokens: int, fraction: float = 0.9) -> tuple[str, ...]:
    return (
        "--backend", "pytorch", "--max_batch_size", str(batch), "--max_num_tokens", str(tokens),
        "--kv_cache_free_gpu_memory_fraction", str(fraction), "--tp_size", "1", "--ep_size", "1",
        "--trust_remote_code",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    shape: str
    tiny: str  # a shape with the same kinds of layers
    program: tuple[str, ...] = TRTLLM
    flags: tuple[str, ...]
    file: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = None  # fewer than the model has
    long_prompt: int = 0  # ids of one more prompt


_OSS = {
    "latency": _GRAPHS_720
    | _STREAMS
    | {"enable_attention_dp": False, "moe_config": {"backend": "TRTLLM"}},
    "throughput": _GRAPHS_720
    | _STREAMS
    | {
        "enable_attention_dp": True,
        "attention_dp_config": {
            "enable_balance": True,
            "batching_wait_iters": 50,
            "timeout_iters": 1,
        },
        "moe_config": {"backend": "CUTLASS"},
    },
}


def evaluation(kind: str, batch: int, tokens: int, long_prompt: int = 0) -> Recipe:
    graphs = {"cuda_graph_config": {"enable_padding": True, "max_batch_size": min(batch, 720)}}
    return Recipe(
        shape="gpt-oss-120b",
        tiny="tiny-gpt-oss",
        flags=flags(batch, tokens),
        file=_OSS[kind] | graphs,
        long_prompt=long_prompt,
    )


RECIPES = {
    "gpt-oss-20b": Recipe(
        shape="gpt-oss-20b",
        tiny="tiny-gpt-oss",
        flags=flags(720, 16384),
        file=_OSS["throughput"],
    ),
    "gpt-oss-120b": Recipe(
        shape="gpt-oss-120b", tiny="tiny-gpt-oss", flags=flags(720, 16384), file=_OSS["latency"]
    ),
    "qwen3-30b-a3b": Recipe(
        shape="qwen3-30b-a3b",
        tiny="tiny-qwen3-moe",
        program=PENSTOCK,
        flags=flags(720, 16384),
        file=_OSS["latency"],
    ),
    "qwen3-next-80b": Recipe(
        shape="qwen3-next-80b",
        tiny="tiny-qwen3-next",
        flags=flags(720, 16384),
        file=_OSS["latency"],
    ),
    "deepseek-r1": Recipe(
        shape="deepseek-r1",
        tiny="tiny-deepseek",
        flags=(*flags(1024, 3200, 0.8), "--max_seq_len", "2048"),
        file={
            "enable_attention_dp": True,
            "cuda_graph_config": {"enable_padding": True, "max_batch_size": 128},
            "kv_cache_config": {"dtype": "fp8"},
            "stream_interval": 10,
            "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1},
            "moe_config": {"backend": "DEEPGEMM", "max_num_tokens": 3200},
        },
        num_layers=13,
    ),
    "qwen1.5-moe": Recipe(
        shape="qwen1.5-moe-a2.7b", tiny="tiny-qwen2-moe", flags=("--tp_size", "1", "--ep_size", "1")
    ),
}
EVALUATION = {
    "dep, low or medium": evaluation("throughput", 128, 32768),
    "dep, high": evaluation("throughput", 2, 133120, 130000),
    "tp, low or medium": evaluation("latency", 1024, 32768),
    "tp, high": evaluation("latency", 720, 133120, 130000),
}


class RecipeServer(Server):
    start_timeout_s = 300.0

    def __init__(self, recipe: Recipe, config: dict[str, Any], is_tiny: bool) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.log = folder / "server.log"
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, folder)
        (folder / "recipe.yml").write_text(yaml.safe_dump(recipe.file))
        command = [sys.executable, *recipe.program, str(folder), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *recipe.flags]
        command += ["--load_format", "dummy", "--extra_llm_api_options", str(folder / "recipe.yml")]
        if recipe.num_layers is not None and not is_tiny:
            command += ["--set", f"model_kwargs.num_hidden_layers={recipe.num_layers}"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def check(name: str, recipe: Recipe, args: argparse.Namespace) -> list[str]:
    """What is wrong; prints the line."""
    config = SHAPES[recipe.tiny if args.tiny else recipe.shape]
    started = time.perf_counter()
    try:
        server = RecipeServer(recipe, config, args.tiny).__enter__()
    except AssertionError as refusal:
        print(f"FAIL {name}: {str(refusal)[-1500:]}", flush=True)
        return ["it does not start"]
    start_s = time.perf_counter() - started
    found: list[str] = []
    try:
        memory = server.version()["memory"]
        found += wrong_memory(recipe, config, memory, args.tiny)
        asked = time.perf_counter()
        found += ask(server, config, recipe, args.tiny)
        ask_s = time.perf_counter() - asked
    except (AssertionError, httpx.HTTPError, KeyError) as error:
        found.append(f"{type(error).__name__}: {str(error)[:600]}")
        memory, ask_s = {}, 0.0
    log = server.log.read_text(errors="replace")
    if (code := server.stop()) != 0:
        found.append(f"it ended with code {code}")
    if problem := PROBLEM.search(log):
        found.append(f"in its log: {log[problem.start() : problem.start() + 1500]}")
    sizes = ", ".join(
        f"{part.removesuffix('_bytes')} {memory[part] / GIB:.1f}"
        for part in ("weights_bytes", "activations_bytes", "graphs_bytes", "kv_cache_bytes")
        if part in memory
    )
    warnings = len(set(WARNING.findall(log)))
    print(
        f"{'FAIL' if found else 'ok  '} {name}: start {start_s:.1f} s, asked {ask_s:.1f} s, "
        f"GiB: {sizes}; {warnings} warnings" + "".join(f"\n     {each}" for each in found),
        flush=True,
    )
    if args.verbose or found:
        print("\n".join(f"     | {line}" for line in log.splitlines()[-args.log_lines :]))
    return found


def wrong_memory(
    recipe: Recipe, config: dict[str, Any], memory: dict[str, int], is_tiny: bool
) -> list[str]:
    """The weights are those of the model, neither unpacked nor doubled."""
    changes = {}
    if recipe.num_layers is not None and not is_tiny:
        changes = {"num_hidden_layers": recipe.num_layers}
    row = Row(shape=recipe.tiny if is_tiny else recipe.shape, changes=changes)
    expected = roofline_of(row).weight_bytes + 2 * config["vocab_size"] * config["hidden_size"]
    share = memory["weights_bytes"] / expected
    if not is_tiny and not 0.97 < share < 1.05:
        return [f"weights take {share:.2f} times what they should"]
    return [] if memory["kv_cache_bytes"] > 0 else ["no cache is planned"]


def ask(server: Server, config: dict[str, Any], recipe: Recipe, is_tiny: bool) -> list[str]:
    found: list[str] = []
    text = "Where is New York?"
    whole = server.post(
        "/v1/completions", model="m", prompt=text, max_tokens=16, temperature=0, ignore_eos=True,
        logprobs=1,
    )  # fmt: skip
    found += wrong_usage("a completion", whole["usage"], 16)
    values = whole["choices"][0]["logprobs"]["token_logprobs"]
    if len(values) != 16 or not all(v is not None and math.isfinite(v) for v in values):
        found.append(f"log-probabilities are {values}")
    found += ask_chat(server, text)
    found += ask_many(server, config["vocab_size"], FEW if is_tiny else MANY)
    if recipe.long_prompt and not is_tiny:
        found += ask_long(server, config["vocab_size"], recipe.long_prompt)
    if httpx.get(f"{server.url}/health", timeout=10).status_code != 200:
        found.append("it is not healthy afterwards")
    return found


def wrong_usage(what: str, usage: dict[str, int], num_tokens: int) -> list[str]:
    is_right = (
        usage["completion_tokens"] == num_tokens
        and usage["prompt_tokens"] > 0
        and usage["total_tokens"] == usage["prompt_tokens"] + num_tokens
    )
    return [] if is_right else [f"{what} of {num_tokens} tokens counts {usage}"]


def ask_chat(server: Server, text: str) -> list[str]:
    """Streamed, with its usage at the end."""
    body = {
        "model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 48,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        "temperature": 1.0, "top_p": 1.0, "seed": 1,
    }  # fmt: skip
    url, events = f"{server.url}/v1/chat/completions", []
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        if reply.status_code != 200:
            return [f"a chat is answered with {reply.status_code}: {reply.read()[:300]!r}"]
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return [f"a chat ends with {events[-1:]}"]
    chunks = [json.loads(event) for event in events[:-1]]
    if failed := [chunk["error"] for chunk in chunks if "error" in chunk]:
        return [f"a chat fails: {failed[0]}"]
    finishes = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    found = wrong_usage("a streamed chat", chunks[-1]["usage"], 48)
    return found + ([] if "length" in finishes else [f"a chat finishes with {set(finishes)}"])


def ask_many(server: Server, vocab_size: int, count: int) -> list[str]:
    """Prompts of different lengths at once, each answer drawn from a seed of its own."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 400))] for _ in range(count)
    ]

    def one(seed: int) -> dict[str, Any]:
        return server.post(
            "/v1/completions", model="m", prompt=prompts[seed], max_tokens=MANY_TOKENS,
            temperature=1, seed=seed, ignore_eos=True,
        )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(one, range(count)))
    return [
        wrong
        for seed, answer in enumerate(answers)
        for wrong in wrong_usage(f"prompt {seed}", answer["usage"], MANY_TOKENS)
    ]


def ask_long(server: Server, vocab_size: int, num_ids: int) -> list[str]:
    rng = random.Random(1)
    prompt = [rng.randrange(vocab_size) for _ in range(num_ids)]
    started = time.perf_counter()
    answer = server.post(
        "/v1/completions", model="m", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True
    )
    print(f"     {num_ids} ids and 8 tokens took {time.perf_counter() - started:.1f} s", flush=True)
    return wrong_usage(f"a prompt of {num_ids} ids", answer["usage"], 8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--evaluation", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="the log of each")
    parser.add_argument("--log_lines", type=int, default=30, help="how much of it")
    args = parser.parse_args()
    recipes = EVALUATION if args.evaluation else RECIPES
    if unknown := set(args.names) - recipes.keys():
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(recipes)}")
    failed = [name for name in args.names or recipes if check(name, recipes[name], args)]
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
