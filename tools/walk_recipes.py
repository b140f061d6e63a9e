"""Walks the published recipes line by line on this machine's CPU and says what became of each.

    python tools/walk_recipes.py RECIPE... [--only NAME] [--list] [--markdown] [--json]
        [--lm_eval PYTHON] [--gpt_oss PYTHON]

PYTHON: one that has the package (gpt-oss wants 3.12); with local data its lines run, too.
RECIPE: the files. A small trained model stands in for each model (of the same architecture for
DeepSeek, gpt-oss, Qwen3-Next and Qwen1.5-MoE, else the built-in Llama), one rank for several GPUs,
a free port for 8000. Every line gets a verdict:

    ran        as printed, but for model, address and folder
    differs    ran with the change that is named
    needs      what is named and is not here: a container, Slurm, the network
    not there  Penstock has no such thing
    failed     it should have run

The exit code is 1 if a line failed. Servers are stopped when the next one starts, and at the end.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from recipe_evals import TINY, write_gpt_oss, write_gsm8k
from recipe_lines import Command, commands, named_files

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S, COMMAND_TIMEOUT_S = 90, 180
RAN, DIFFERS, NEEDS, NOT_THERE, FAILED = "ran", "differs", "needs", "not there", "failed"
PACKAGES = ("lm_eval", "gpt_oss")
_SIBLINGS = ROOT / "tests" / "siblings"
# How the name of a model begins -> what stands in for it.
STAND_INS = {
    "deepseek-ai/": str(_SIBLINGS / "deepseek_v3"),
    "nvidia/DeepSeek": str(_SIBLINGS / "deepseek_v3"),
    "openai/gpt-oss": str(_SIBLINGS / "gpt_oss"),
    "Qwen/Qwen3-Next": str(_SIBLINGS / "qwen3_next"),
    "Qwen/Qwen1.5-MoE": str(_SIBLINGS / "qwen2_moe"),
}
_MODEL = re.compile(r"\b(?:deepseek-ai|nvidia|openai|Qwen)/[\w.-]+\w")
_HOST = re.compile(r"localhost:8000|<HEAD_IP>:8000")
_RANKS = re.compile(r"(--(?:tp|ep|pp)_size |\bTP=|tensor_parallel_size: )(\d+)")
_COMMENT = re.compile(r"#.*")
_IGNORED = re.compile(r" W \[http\] (\S+?)(?:: \S+)? is ignored: ")
SHORT_LOAD = "--num-prompts 2 --random-input-len 20 --random-output-len 3"
# Of the recipes' bench.sh: what makes it end within seconds.
SHORTER = {
    r'concurrency_list="[\d ]+"': 'concurrency_list="1 2"',
    r"isl=\d+": "isl=20",
    r"osl=\d+": "osl=3",
    r"multi_round=\d+": "multi_round=1",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    recipe: str
    line: int
    command: str
    verdict: str
    note: str = ""


def stand_in(model: str) -> str:
    return next((path for begin, path in STAND_INS.items() if model.startswith(begin)), "tiny")


class Walk:
    """One recipe: its working folder, its shell variables and the server that runs. `pythons` have
    a package each."""

    def __init__(self, path: Path, folder: Path, pythons: dict[str, str]) -> None:
        self.path, self.folder, self._pythons = path, folder, pythons
        self.port = _free_port()
        self._variables: dict[str, str] = {}
        self._extra_flags = ""  # a fragment that is to be added to bench.sh
        self._server: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"
        _make_environment(folder / "venv")
        for name, content in named_files(path).items():
            (folder / name).write_text(_RANKS.sub(r"\g<1>1", content))

    def step(self, command: Command) -> Outcome:
        try:
            verdict, note = self._dispatch(command.text)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            verdict, note = FAILED, str(error)
        note = " ".join(note.split())
        return Outcome(command.recipe, command.line, command.summary, verdict, note)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        # Its group: make does not pass a signal on to what it runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)

    def _dispatch(self, text: str) -> tuple[str, str]:
        if found := re.fullmatch(r"(\w+)=(\S+)", text):
            self._variables[found[1]] = self._mapped(found[2])
            return RAN, ""
        if text.startswith("--"):
            self._extra_flags = re.sub(r"\s*\\\n\s*", " ", text)
            return RAN, "added to bench.sh"
        first, second = [*text.split(), ""][:2]
        if missing := self._missing(first, second, text):
            return missing
        if first == "trtllm-serve" or (first, second) == ("make", "serve"):
            return self._serve(text)
        if first == "lm_eval":
            return self._lm_eval(text)
        if "gpt_oss.evals" in text:
            return self._gpt_oss(text)
        if first == "./bench.sh":
            return self._own_bench()
        if (first, second) == ("make", "bench"):
            return self._make_bench(text)
        if "<<EOF" in text:  # every ${variable} of the script would become nothing
            return self._run(text.replace("<<EOF", "<<'EOF'"), "EOF quoted", DIFFERS)
        if second == "test.sh":
            at = f"bash {ROOT / 'test.sh'} -H 127.0.0.1 -p {self.port}"
            return self._run(at, "Results: 8 passed")
        return self._run(self._mapped(text), "")

    def _missing(self, first: str, second: str, text: str) -> tuple[str, str] | None:
        """The verdict on a line that asks for what is not here."""
        if first == "docker":
            return NEEDS, "a container engine and GPUs"
        if first == "make" and second not in _targets():
            return NOT_THERE, f"make has no target '{second}'"
        if first == "make" and second in ("docker", "save"):
            return NEEDS, "a container engine"
        if first == "salloc":
            return NEEDS, "Slurm"
        if second == "run.sbatch":
            return NEEDS, "Slurm"
        if second == "bench.sh" and " -i " in text:
            return NEEDS, "a container engine"
        if first == "pip":
            return NEEDS, "the network"
        if first == "lm_eval" and "lm_eval" not in self._pythons:
            return NEEDS, "the package lm_eval"
        if "gpt_oss.evals" in text and "gpt_oss" not in self._pythons:
            return NEEDS, "the package gpt-oss"
        return None

    def _mapped(self, text: str) -> str:
        text = _MODEL.sub(lambda found: stand_in(found[0]), text)
        text = _HOST.sub(f"127.0.0.1:{self.port}", text)
        return re.sub(r"/tmp/([\w-]+)", self._moved, text)

    def _moved(self, found: re.Match[str]) -> str:
        """A recipe's file in /tmp lies in our folder. That, or this checkout, may be there too."""
        is_ours = any(f"{path}/".startswith(f"{found[0]}/") for path in (ROOT, self.folder))
        return found[0] if is_ours else f"{self.folder}/{found[1]}"

    def _serve(self, text: str) -> tuple[str, str]:
        self.close()
        files = [content for name, content in named_files(self.path).items() if name in text]
        asked = _RANKS.finditer("\n".join([text, *(_COMMENT.sub("", one) for one in files)]))
        ranks = [found[0] for found in asked if found[2] != "1"]
        mapped = _RANKS.sub(r"\g<1>1", self._mapped(text)).replace("\\\n", " ")
        if mapped.startswith("make"):
            mapped += f" PORT={self.port} VENV={self.folder / 'venv'} -C {ROOT}"
        else:
            mapped = mapped.replace("--port 8000", "") + f" --port {self.port}"
        mapped = mapped.replace("--host 0.0.0.0", "--host 127.0.0.1")
        with self._log.open("wb") as log:
            command = ["bash", "-c", f"exec {mapped}"]
            self._server = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()
        ignored = sorted(set(_IGNORED.findall(self._log.read_text())))
        changes = [f"{', '.join(ranks)} as 1"] if ranks else []
        changes += [f"{', '.join(ignored)} ignored"] if ignored else []
        model = next((Path(stand_in(found)).name for found in _MODEL.findall(text)), "")
        return DIFFERS if changes else RAN, "; ".join([f"served {model}", *changes])

    def _wait(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._server.poll() is None:
            if "Application startup complete." in self._log.read_text():
                return
            time.sleep(0.1)
        last = self._log.read_text().strip().splitlines()[-1:]
        raise RuntimeError(f"the server did not start: {''.join(last)}")

    def _own_bench(self) -> tuple[str, str]:
        script = self.folder / "bench.sh"
        text = self._mapped(script.read_text())
        for long, short in SHORTER.items():
            text = re.sub(long, short, text)
        flags = f"--port {self.port} {self._extra_flags}"
        script.write_text(text.replace("--backend openai", f"{flags} --backend openai"))
        verdict, note = self._run("./bench.sh", "Serving Benchmark Result")
        is_saved = any(self.folder.rglob("concurrency_2.json"))
        if verdict == RAN and self._extra_flags and not is_saved:
            return FAILED, "no result file"
        return (DIFFERS, "2 levels of 20 tokens in, 3 out") if verdict == RAN else (verdict, note)

    def _lm_eval(self, text: str) -> tuple[str, str]:
        """Its GSM8K with local problems, and the tokenizer of what stands in for the model."""
        python, folder = self._pythons["lm_eval"], self.folder / "tasks"
        find = "import lm_eval; print(lm_eval.__path__[0])"
        found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
        write_gsm8k(folder, Path(found.stdout.strip()) / "tasks" / "gsm8k" / "gsm8k.yaml")
        model = self._variables.get("MODEL_PATH", "tiny")
        mapped = self._mapped(text).replace("lm_eval ", f"{python} -m lm_eval ", 1)
        mapped = mapped.replace("${MODEL_PATH}", str(TINY) if model == "tiny" else model)
        verdict, note = self._run(f"{mapped} --include_path {folder}", "exact_match")
        [*samples] = self.folder.rglob("samples_gsm8k_*.jsonl")
        if verdict == RAN and not samples:
            return FAILED, "no samples were written"
        return (
            (DIFFERS, "problems that are here, not GSM8K's") if verdict == RAN else (verdict, note)
        )

    def _gpt_oss(self, text: str) -> tuple[str, str]:
        """96 requests: of six questions, each asked eight times with either effort."""
        folder = self.folder / "evals"
        write_gpt_oss(folder)
        mapped = re.sub(r"\\\n", " ", text).replace("python ", f"{self._pythons['gpt_oss']} ", 1)
        at = f"--base-url http://127.0.0.1:{self.port}/v1 --n-threads 8"
        command = f"OPENAI_API_KEY=none PYTHONPATH={folder} {mapped} {at}"
        verdict, note = self._run(command, "'eval_name': 'aime25'")
        for path in Path(tempfile.gettempdir()).glob("*_gpt-oss-120b-*_temp1.0_*"):
            path.unlink()
        return (
            (DIFFERS, "questions that are here, 8 threads") if verdict == RAN else (verdict, note)
        )

    def _make_bench(self, text: str) -> tuple[str, str]:
        mapped = re.sub(r"HOST=\S+", "HOST=127.0.0.1", text)
        note = "2 requests of 20 tokens in, 3 out"
        if "BENCH_TYPE" not in mapped:
            mapped += " BENCH_TYPE=throughput,prefill,decode,latency,concurrency"
            note += "; sharegpt needs the network"
        out = self.folder / "results"
        mapped += f" PORT={self.port} VENV={self.folder / 'venv'} -C {ROOT}"
        mapped += f" ARGS='-o {out} -- {SHORT_LOAD}'"
        return self._run(mapped, note, DIFFERS)

    def _run(self, text: str, note: str, verdict: str = RAN) -> tuple[str, str]:
        """`note` of a line that ran as printed is what it must have said."""
        # A response with an error status is a failure.
        shell = 'curl() { command curl --fail-with-body -sS --max-time 120 "$@"; }\n' + text
        done = subprocess.run(
            ["bash", "-c", shell],
            cwd=self.folder,
            env=self._env(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        said = (done.stdout + done.stderr).strip()
        if done.returncode:
            return FAILED, f"code {done.returncode}: {said[-200:]}"
        if verdict == RAN and note not in done.stdout:
            return FAILED, f"it did not say '{note}': {said[-200:]}"
        return verdict, note

    def _env(self) -> dict[str, str]:
        path = f"{self.folder / 'venv' / 'bin'}:{os.environ['PATH']}"
        # make must not see that another one runs this
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        env |= {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self._variables}
        if importlib.util.find_spec("tensorrt_llm") is None:  # `make setup` installs it
            env["PYTHONPATH"] = str(ROOT / "compat" / "src")
        return env


def _make_environment(folder: Path) -> None:
    """What the Makefile takes for an installed .venv: commands that run this Python's packages."""
    (folder / "bin").mkdir(parents=True)
    entries = {"penstock": "main", "trtllm-serve": "trtllm_serve", "trtllm-bench": "trtllm_bench"}
    for name, function in entries.items():
        code = f"from penstock.cli.main import {function}; {function}()"
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
        script.chmod(0o755)
    # No link: Python would look for its packages beside it.
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / ".installed").touch()


def _targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def walk(path: Path, pythons: dict[str, str]) -> list[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix="walk-"))
    one = Walk(path, folder, pythons)
    try:
        return [one.step(command) for command in commands(path)]
    finally:
        one.close()
        shutil.rmtree(folder, ignore_errors=True)


def show(outcomes: Sequence[Outcome], is_markdown: bool) -> None:
    if is_markdown:
        print("| line | command | verdict | |\n| --- | --- | --- | --- |")
    for one in outcomes:
        place = f"{one.recipe}:{one.line}"
        command = one.command if len(one.command) <= 70 else one.command[:67] + "..."
        if is_markdown:
            command = command.replace("|", "\\|")
            print(f"| {one.line} | `{command}` | {one.verdict} | {one.note}".rstrip() + " |")
        else:
            print(f"{place:<28} {one.verdict:<9} {command:<70}  {one.note}".rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE")
    parser.add_argument("--only", help="the recipe whose file name begins so")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--json", action="store_true", help="print JSON")
    for package in PACKAGES:
        parser.add_argument(f"--{package}", metavar="PYTHON", help=f"one that has {package}")
    args = parser.parse_args(argv)
    pythons = {name: getattr(args, name) for name in PACKAGES if getattr(args, name)}
    paths = [path for path in args.recipes if path.name.startswith(args.only or "")]
    if not paths:
        parser.error(f"no recipe begins with '{args.only}'")
    if args.list:
        for command in (command for path in paths for command in commands(path)):
            print(f"{command.recipe}:{command.line}\t{command.summary}")
        return 0
    outcomes: list[Outcome] = []
    for path in paths:
        outcomes += (found := walk(path, pythons))
        if not args.json:
            if args.markdown:
                print(f"\n### {path.name}\n")
            show(found, args.markdown)
    if args.json:
        print(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=2))
    else:
        counts = Counter(one.verdict for one in outcomes).items()
        print(f"\n{len(outcomes)} lines:", ", ".join(f"{num} {name}" for name, num in counts))
    return int(any(one.verdict == FAILED for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
