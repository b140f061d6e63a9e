"""Local data for the recipes' evaluations, whose own comes from the network: word problems in place
of GSM8K's, sums in place of those of AIME and GPQA."""

import csv
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ROOT / "src" / "penstock" / "hub" / "tiny"
NUM_PROBLEMS, NUM_SUMS = 8, 2
# The task of lm-eval under its own name, with its prompts and filters, and other data.
_GSM8K = """
include: {packaged}
task: gsm8k
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {data}, test: {data}}}}}
"""
# Python runs this at its start: what gpt_oss.evals reads from an address comes from `folder`.
_SITE = """
import pandas

def local(read):
    def of(path, *args, **kwargs):
        name = path.rpartition("/")[2]
        return read(rf"{folder}/{{name}}" if path.startswith("https://") else path, *args, **kwargs)
    return of

pandas.read_json = local(pandas.read_json)
pandas.read_csv = local(pandas.read_csv)
"""


def write_gsm8k(folder: Path, packaged: Path) -> None:
    """Task and problems; `packaged` is lm-eval's own task."""
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(ROOT / "tools" / "siblings"))
    import corpus

    problems = [one for one in corpus.held_out_examples(8, 24) if one.skill == "problem"]
    rows = [
        {"question": one.messages[-2]["content"], "answer": one.messages[-1]["content"]}
        for one in problems[:NUM_PROBLEMS]
    ]
    data = folder / "problems.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "gsm8k.yaml").write_text(_GSM8K.format(packaged=packaged, data=data))


def write_gpt_oss(folder: Path) -> None:
    """The files of AIME and GPQA, and a `sitecustomize` that reads them."""
    folder.mkdir(exist_ok=True)
    for part in ("I", "II"):
        rows = [{"question": f"What is {n} + 4?", "answer": str(n + 4)} for n in range(NUM_SUMS)]
        (folder / f"aime2025-{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with (folder / "gpqa_diamond.csv").open("w", newline="") as file:
        wrong = [f"Incorrect Answer {n}" for n in (1, 2, 3)]
        writer = csv.DictWriter(file, ["Question", "Correct Answer", *wrong])
        writer.writeheader()
        for n in range(NUM_SUMS):
            answers = dict(zip(wrong, (1, 2, 3), strict=True))
            writer.writerow({"Question": f"What is {n} + 4?", "Correct Answer": n + 4, **answers})
    (folder / "sitecustomize.py").write_text(_SITE.format(folder=folder))
