"""Packs both corpora and trains all siblings at once on one GPU: train_all.py FOLDER --minutes M.

The siblings are too small to fill a GPU alone, so each is a process of its own. The light ones stop
after a number of steps, the others train on; together they end within the minutes, packing and
scoring included. FOLDER gets a checkpoint per sibling and logs/.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
FORMATS = {
    "llama": "chatml",
    "qwen2_moe": "chatml",
    "deepseek_v3": "chatml",
    "gpt_oss": "harmony",
    "qwen3_next": "chatml",
}
# (steps, tokens of a step) after which the light ones know their skills and leave the GPU to the
# other two; sorting needs the larger steps of them
LIGHT = {"llama": (6000, 32768), "qwen2_moe": (5400, 32768), "deepseek_v3": (4700, 32768)}
POLL_S = 1.0
REPORT_S = 30.0


def run_all(
    commands: dict[str, list[str]], logs: Path, deadline: float, threads: int
) -> dict[str, int]:
    """Run the commands at once, each into its log; what is not done by the deadline is ended."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name, command in commands.items():
        with open(logs / f"{name}.log", "wb") as log:
            running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
    start = last_report = time.monotonic()
    while any(process.poll() is None for process in running.values()):
        time.sleep(POLL_S)
        now = time.monotonic()
        if now > deadline:
            for process in running.values():
                process.kill()
        if now - last_report > REPORT_S:
            last_report = now
            for name in running:
                print(f"{now - start:4.0f} s {name}: {last_line(logs / f'{name}.log')}", flush=True)
    return {name: process.wait() for name, process in running.items()}


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1][:200] if lines else ""


def summary(folder: Path, names: list[str]) -> str:
    """A row per skill, a column per sibling."""
    scores = {}
    for name in names:
        path = folder / name / "scores.json"
        scores[name] = json.loads(path.read_text()) if path.exists() else {}
    skills = dict.fromkeys(skill for found in scores.values() for skill in found)
    lines = [f"| skill | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for skill in skills:
        cells = [f"{s[skill]:.1%}" if skill in s else "" for s in scores.values()]
        lines.append(f"| {skill} | {' | '.join(cells)} |")
    return "\n".join(lines)


def limits(name: str) -> list[str]:
    if name not in LIGHT:
        return []
    steps, tokens = LIGHT[name]
    return ["--steps", str(steps), "--batch", str(tokens)]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoints and logs go")
    parser.add_argument("--data", type=Path, required=True, help="where the packed corpora go")
    parser.add_argument("--minutes", type=float, default=9.6, help="for everything")
    parser.add_argument("--ending", type=float, default=30.0, help="seconds kept for scoring")
    parser.add_argument("--docs", type=int, default=1_600_000, help="chats; harmony gets half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    parser.epilog = "other arguments, such as --steps, --batch and --lr, go to every train.py"
    return parser.parse_known_args()


def main() -> None:
    args, train_args = parse_args()
    start = time.monotonic()
    deadline = start + args.minutes * 60
    logs = args.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    formats = sorted({FORMATS[name] for name in args.only})
    cores = os.cpu_count() or 1
    packing = {}
    for format in formats:
        docs = args.docs if format == "chatml" else args.docs // 2
        packing[f"packing-{format}"] = [
            *(sys.executable, str(HERE / "packing.py"), str(args.data / format)),
            *("--format", format, "--docs", str(docs), "--workers", str(cores)),
            *("--seed", str(args.seed)),
        ]
    failed = [name for name, rc in run_all(packing, logs, deadline, 1).items() if rc]
    for name in packing:
        print(f"{name}: {last_line(logs / f'{name}.log')}", flush=True)
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; see {logs}")
    left_s = deadline - time.monotonic() - args.ending
    if left_s <= 0:
        raise SystemExit(f"no time is left after packing; raise --minutes (now {args.minutes})")
    ends_at = time.time() + left_s
    command = shlex.join(["tools/siblings/train_all.py", *sys.argv[1:]])
    training = {
        name: [
            *(sys.executable, str(HERE / "train.py"), name, str(args.folder / name)),
            *("--data", str(args.data / FORMATS[name]), "--seed", str(args.seed)),
            *("--ends-at", str(ends_at), "--command", command, *limits(name), *train_args),
        ]
        for name in args.only
    }
    print(f"training {', '.join(training)} for {left_s:.0f} s", flush=True)
    threads = max(cores // len(training), 1)
    failed = [name for name, rc in run_all(training, logs, deadline, threads).items() if rc]
    for name in failed:
        print(f"{name} failed:\n{(logs / f'{name}.log').read_text(errors='replace')[-3000:]}")
    print(summary(args.folder, args.only))
    print(f"{time.monotonic() - start:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
