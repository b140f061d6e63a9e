"""All checks on this GPU in a few minutes; failures first, each with the end of what it said.

    python tests/gpu/all.py [PART ...] [--logs FOLDER] [--list]     any python that has torch
    pytest tests/gpu                                                the same parts, as tests

Parts run side by side, those that measure alone and last. One that hangs or fails stops no other.
What is timed rather than checked is in benchmarks/. Not among the parts are whole servers
(recipes_check.py, http_check.py) and what needs another machine's file (default_model_check.py).
"""

import argparse
import concurrent.futures
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NUM_SIDE_BY_SIDE = 4
SHOWN_LINES = 25
ELSEWHERE = (  # ops that have a part of their own, with larger cases
    *(
        "experts",
        "route",
        "router_logits",
        "add_shared",
        "mla_write",
        "mla_decode",
        "mla_project",
        "mla_attend",
    ),
    *("quantize_fp8", "rms_norm_fp8", "silu_mul_fp8", "fp8_linear"),
    *(
        "causal_conv",
        "delta_gates",
        "gated_delta",
        "keep_conv",
        "keep_delta",
        "rms_norm_gated",
        "sigmoid_mul",
    ),
)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]  # of python
    timeout_s: float = 150.0
    is_alone: bool = False  # it measures


def script(file: str, *arguments: str) -> tuple[str, ...]:
    return (str(HERE / file), *arguments)


def parts() -> list[Part]:
    found = [
        Part("ops", script("ops_check.py", "--jobs", "8", "--skip", *ELSEWHERE), 300.0),
        Part("experts", script("moe_check.py", "ops"), 200.0),
        Part("fp8", script("fp8_check.py", "ops", "models")),
        Part("weight-only", script("weight_only_check.py")),
        Part("block-scaled", script("block_scaled_check.py")),
        Part("latent attention", script("mla_check.py", "ops", "layer")),
        Part("delta net", script("delta_check.py", "ops", "graph")),
        Part("sampling", script("sampling_check.py", "checks")),
        Part("engine parity", script("engine_check.py", "parity")),
        Part("engine stress", script("engine_check.py", "stress")),
        Part("two ranks", script("tp_check.py")),
        Part("collectives", script("collectives_check.py"), is_alone=True),
        Part("adapters", script("lora_check.py")),
    ]
    if importlib.util.find_spec("pytest") is not None:
        found.append(Part("kernels", ("-m", "pytest", "-q", str(HERE / "test_kernels_gpu.py"))))
    for folder in (ROOT / "src/penstock/hub/tiny", *sorted((ROOT / "tests/siblings").iterdir())):
        found.append(Part(f"texts of {folder.name}", script("texts_check.py", str(folder))))
        found.append(Part(f"drafts of {folder.name}", script("drafts_check.py", str(folder))))
    found.append(Part("engine trace", script("engine_check.py", "trace"), 90.0, is_alone=True))
    return found


def log_of(part: Part, logs: Path) -> Path:
    return logs / f"{part.name.replace(' ', '_')}.log"


def complaints(part: Part, logs: Path) -> list[str]:
    """What a failed part says is wrong, else the end of what it said."""
    lines = log_of(part, logs).read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith("FAIL")][:SHOWN_LINES]
    return [line[:300] for line in found or lines[-SHOWN_LINES:]]


def run(part: Part, logs: Path) -> tuple[Part, str, float]:
    """(the part, what is wrong with it, seconds)."""
    began = time.monotonic()
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log_of(part, logs).open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *part.command], stdout=out, stderr=out, start_new_session=True,
            cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
        )  # fmt: skip
    try:
        code = process.wait(part.timeout_s)
        wrong = f"code {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes it started
        process.wait()
        wrong = f"not done after {part.timeout_s:.0f} s"
    seconds = time.monotonic() - began
    print(f"  {part.name}: {wrong or 'ok'}, {seconds:.0f} s", flush=True)
    return part, wrong, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="PART", help="or the beginning of its name")
    parser.add_argument("--logs", type=Path, help="keep what the parts say here")
    parser.add_argument("--list", action="store_true", help="name the parts")
    args = parser.parse_args()
    chosen = [p for p in parts() if not args.names or p.name.startswith(tuple(args.names))]
    if args.list:
        print("\n".join(f"{part.name}: python {' '.join(part.command)}" for part in chosen))
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        side_by_side = [part for part in chosen if not part.is_alone]
        with concurrent.futures.ThreadPoolExecutor(NUM_SIDE_BY_SIDE) as pool:
            results = list(pool.map(lambda part: run(part, logs), side_by_side))
        results += [run(part, logs) for part in chosen if part.is_alone]
        failed = [(part, wrong) for part, wrong, _ in results if wrong]
        for part, wrong in failed:
            print(f"\nFAIL {part.name}: {wrong}")
            print("\n".join(f"  | {line}" for line in complaints(part, logs)))
    print(
        f"\n{len(chosen) - len(failed)} of {len(chosen)} parts ok, "
        f"{time.monotonic() - began:.0f} s" + "".join(f"; FAIL {p.name}" for p, _ in failed)
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
