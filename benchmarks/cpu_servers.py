"""Penstock's server against other servers on this CPU: same model, prompts and threads, over HTTP.

    python benchmarks/cpu_servers.py penstock penstock-16 generate transformers vllm llama.cpp \\
        --vllm_python PATH --llama_server PATH [--threads 2] [--rounds 3] [--json FILE]

The servers named run one after the other, never two at once. The model is SmolLM2 135M: Penstock
and llama.cpp read its GGUF file, the others the same weights unpacked to fp32, which this command
writes once to FOLDER/smollm2-fp32 (`--folder`). `penstock-16` is Penstock with `--dtype bfloat16`:
GEMMs with 16 bits of their inputs. `generate` is no server: it is transformers' `generate` in
this process.

One client sends greedy completions of `--tokens` tokens, end-of-text ignored:
- decode: one streamed request, tokens after the first per second;
- c8: eight requests at once, not streamed, all their tokens over the time to the last answer;
- start: from starting the process to the first token that arrives, best of `--starts`.

Every prompt begins differently, so no prefix cache helps. The best round counts, because other work
on the machine only ever adds time. An answer of another length than asked for ends the benchmark.

transformers needs its `serving` extra, vllm its CPU build, llama.cpp its `llama-server` program.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from penstock.hub.folder import local_folder

MODEL = "smollm2"
NUM_CLIENTS = 8
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 900.0, 30.0
# About 64 tokens with the number before it.
QUESTION = (
    "travellers met at the old stone bridge one rainy evening in October. Each of them carried a "
    "small wooden box, and none of them knew what was inside. The oldest of them looked at the "
    "river, then at the others, and began to tell the story of how the box had come to him:"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """How to start one server on a port, and what its completions need beyond the usual."""

    name: str
    command: list[str]
    model: str
    body: dict[str, Any]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Result:
    name: str
    start_s: float | None
    decode_tokens_per_s: float
    c8_tokens_per_s: float
    text: str  # one answer, to see that all serve the same model


def prompt(number: int) -> str:
    return f"{number} {QUESTION}"


# --- the servers ----------------------------------------------------------------------------------


def servers(args: argparse.Namespace, port: int) -> dict[str, Callable[[], Server]]:
    threads = str(args.threads)
    at = ["--host", "127.0.0.1", "--port", str(port)]

    def extra(name: str) -> list[str]:
        return shlex.split(getattr(args, f"{name}_args"))

    def penstock(name: str = "penstock", *more: str) -> Server:
        command = [sys.executable, "-m", "penstock", "serve", MODEL, *at, "--num_threads", threads]
        body = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return Server(name, [*command, *more, *extra("penstock")], MODEL, body)

    def transformers() -> Server:
        # Without --cb_* its cache takes most of the memory; this is room for all the requests.
        folder = str(unpacked(args.folder))
        command = [
            *(args.transformers_python, "-m", "transformers.cli.transformers", "serve", folder),
            *("--continuous-batching", "--device", "cpu", "--dtype", "float32", *at),
            *("--cb-block-size", "32", "--cb-num-blocks", "128", "--cb-max-batch-tokens", "512"),
        ]
        environment = {"OMP_NUM_THREADS": threads}
        return Server("transformers", command + extra("transformers"), folder, {}, environment)

    def vllm() -> Server:
        folder = str(unpacked(args.folder))
        command = [
            *(args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *at),
            *("--max-model-len", "2048", "--max-num-seqs", str(NUM_CLIENTS)),
        ]
        body = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        }
        openmp = Path(args.vllm_python).parents[1] / "lib" / "libiomp5.so"
        if openmp.is_file():  # it comes with the package and asks to be loaded so
            environment["LD_PRELOAD"] = str(openmp)
        return Server("vllm", command + extra("vllm"), folder, body, environment)

    def llama_cpp() -> Server:
        command = [
            *(args.llama_server, "--model", str(gguf_file()), *at, "--threads", threads),
            *("--threads-batch", threads, "--parallel", str(NUM_CLIENTS)),
            *("--ctx-size", str(NUM_CLIENTS * 512), "--threads-http", str(NUM_CLIENTS)),
        ]
        body = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return Server("llama.cpp", command + extra("llama"), MODEL, body)

    return {
        "penstock": penstock,
        "penstock-16": partial(penstock, "penstock-16", "--dtype", "bfloat16"),
        "transformers": transformers,
        "vllm": vllm,
        "llama.cpp": llama_cpp,
    }


def gguf_file() -> Path:
    return local_folder(MODEL)


def unpacked(folder: Path) -> Path:
    """The GGUF file's weights as an fp32 checkpoint that ends no answer by itself."""
    target = folder / "smollm2-fp32"
    if (target / "tokenizer.json").is_file():
        return target
    import torch
    import transformers

    path = gguf_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    config = loaded.config
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.save_pretrained(target)
    return target


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: v for name, v in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment = inherited | {"HF_HUB_OFFLINE": "1"} | server.environment
    # A benchmark that is told to end, by `timeout` say, takes the server along.
    told_before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        _stop(process)
        signal.signal(signal.SIGTERM, told_before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # Processes that the server started are in the group that was opened for it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- the client -----------------------------------------------------------------------------------


class Client:
    """Sends completions of `num_tokens` tokens to one server."""

    def __init__(self, server: Server, port: int, num_tokens: int) -> None:
        self._server = server
        self.num_tokens = num_tokens
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_TIMEOUT_S, trust_env=False
        )

    def wait(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.02)
        raise SystemExit(f"{self._server.name} does not start; the end of {log}:\n{_tail(log)}")

    def first_token_s(self, text: str) -> float:
        """The time at which the first token of an answer is here."""
        for _ in self._stream(text, 1):
            return time.perf_counter()
        raise SystemExit(f"{self._server.name} ended a stream without any text")

    def decode_rate(self, text: str) -> float:
        first = last = 0.0
        for _ in self._stream(text, self.num_tokens):
            last = time.perf_counter()
            first = first or last
        return (self.num_tokens - 1) / (last - first)

    def complete(self, text: str) -> str:
        body = self._body(text, self.num_tokens)
        body.pop("stream_options", None)
        reply = _checked(self._http.post("/v1/completions", json=body)).json()
        self._check_length(reply["usage"], self.num_tokens)
        return str(reply["choices"][0]["text"])

    def _stream(self, text: str, num_tokens: int) -> Iterator[str]:
        """The pieces of text as they arrive."""
        body = self._body(text, num_tokens) | {"stream": True}
        usage = None
        with self._http.stream("POST", "/v1/completions", json=body) as reply:
            _checked(reply)
            for line in reply.iter_lines():
                piece = line.removeprefix("data:").strip()
                if not piece or piece == "[DONE]":
                    continue
                chunk = json.loads(piece)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    if choice["text"]:
                        yield choice["text"]
        self._check_length(usage, num_tokens)

    def _body(self, text: str, num_tokens: int) -> dict[str, Any]:
        usual = {"model": self._server.model, "prompt": text, "temperature": 0.0}
        return usual | {"max_tokens": num_tokens} | self._server.body

    def _check_length(self, usage: dict[str, Any] | None, num_tokens: int) -> None:
        written = (usage or {}).get("completion_tokens")
        if written != num_tokens:
            raise SystemExit(f"{self._server.name} wrote {written} tokens, not {num_tokens}")


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_error:
        raise SystemExit(f"{reply.url} answers {reply.status_code}: {reply.read()[:2000]!r}")
    return reply


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


# --- measuring ------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, name: str) -> Result:
    log = args.folder / f"{name}.log"
    starts = []
    for i in range(args.starts):
        port = _free_port()
        server = servers(args, port)[name]()
        started = time.perf_counter()
        with running(server, log) as process:
            client = Client(server, port, args.tokens)
            client.wait(process, log)
            starts.append(client.first_token_s(prompt(i)) - started)
            if i == args.starts - 1:
                return _measure_speed(client, server.name, min(starts), args.rounds)
    raise AssertionError("there is at least one start")


def _measure_speed(client: Client, name: str, start_s: float, rounds: int) -> Result:
    text = client.complete(prompt(100))
    decode, c8 = [], []
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for number in range(200, 200 + 100 * rounds, 100):
            decode.append(client.decode_rate(prompt(number)))
            prompts = [prompt(number + 1 + i) for i in range(NUM_CLIENTS)]
            started = time.perf_counter()
            answers = list(clients.map(client.complete, prompts))
            c8.append(len(answers) * client.num_tokens / (time.perf_counter() - started))
    return Result(name, start_s, max(decode), max(c8), text)


def measure_generate(args: argparse.Namespace) -> Result:
    """transformers' own loop, without a server: one prompt, then a batch of eight."""
    import torch
    import transformers
    from transformers.generation.streamers import BaseStreamer

    class Times(BaseStreamer):
        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, value: object) -> None:
            self.at.append(time.perf_counter())

        def end(self) -> None:
            pass

    torch.set_num_threads(args.threads)
    folder = unpacked(args.folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def generate(texts: list[str], streamer: Times | None = None) -> Any:
        batch = tokenizer(texts, return_tensors="pt")  # all prompts of a round are of one length
        options = {"max_new_tokens": args.tokens, "do_sample": False, "streamer": streamer}
        ids = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
        if ids.shape[1] != args.tokens:
            raise SystemExit(f"generate wrote {ids.shape[1]} tokens, not {args.tokens}")
        return ids

    text = str(tokenizer.decode(generate([prompt(100)])[0]))
    decode, c8 = [], []
    for number in range(200, 200 + 100 * args.rounds, 100):
        times = Times()
        generate([prompt(number)], times)
        _, *tokens = times.at  # the streamer is given the prompt first
        decode.append((len(tokens) - 1) / (tokens[-1] - tokens[0]))
        started = time.perf_counter()
        generate([prompt(number + 1 + i) for i in range(NUM_CLIENTS)])
        c8.append(NUM_CLIENTS * args.tokens / (time.perf_counter() - started))
    return Result("generate", None, max(decode), max(c8), text)


def table(results: list[Result]) -> str:
    ours = next((result for result in results if result.name == "penstock"), None)
    lines = [
        "| server | start, s | decode tok/s | Penstock is | c8 tok/s | Penstock is |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in results:
        start = "" if one.start_s is None else f"{one.start_s:.1f}"
        rates = (one.decode_tokens_per_s, one.c8_tokens_per_s)
        ratios = ["", ""]
        if ours is not None and ours is not one:
            mine = (ours.decode_tokens_per_s, ours.c8_tokens_per_s)
            ratios = [f"{a / b:.2f}x" for a, b in zip(mine, rates, strict=True)]
        cells = [one.name, start, f"{rates[0]:.1f}", ratios[0], f"{rates[1]:.1f}", ratios[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    known = ("penstock", "penstock-16", "generate", "transformers", "vllm", "llama.cpp")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=known, metavar="SERVER", help=", ".join(known))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="length of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/cpu_servers"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--transformers_python", default=sys.executable, metavar="PATH")
    parser.add_argument("--vllm_python", default=sys.executable, metavar="PATH")
    parser.add_argument("--llama_server", default="llama-server", metavar="PATH")
    for name in ("penstock", "transformers", "vllm", "llama"):
        parser.add_argument(f"--{name}_args", default="", help="more arguments, as one string")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped as well
    args.folder.mkdir(parents=True, exist_ok=True)
    gguf_file()
    results = []
    for name in args.names:
        results.append(measure_generate(args) if name == "generate" else measure(args, name))
        print(results[-1], flush=True)
    print(table(results))
    if args.json:
        settings = {"threads": args.threads, "rounds": args.rounds, "tokens": args.tokens}
        listed = [dataclasses.asdict(result) for result in results]
        args.json.write_text(json.dumps({**settings, "results": listed}, indent=1))


if __name__ == "__main__":
    main()
