"""One rank of the tensor-parallel test: tp_worker.py RANK SIZE ADDRESS OUT FOLDER:SETS..."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from paged_driver import CPU, load_model, mixed_run, prompts
from safetensors.torch import save_file

from penstock.parallel.mesh import RankMesh
from penstock.types.mesh import MeshShape


def main() -> None:
    rank, size, address, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    met = RankMesh.create(int(rank), MeshShape(tp=int(size)), address, CPU)
    for number, (folder, _, ep_size) in enumerate(case.rpartition(":") for case in cases):
        mesh = replace(met, shape=replace(met.shape, ep=int(ep_size)))
        model = load_model(Path(folder), mesh)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        (Path(out) / f"sizes-{number}-{rank}.json").write_text(json.dumps(sizes))
        with torch.inference_mode():
            model.finish()
        logits = dict(zip("abc", mixed_run(model, prompts(500)), strict=True))
        save_file(logits, Path(out) / f"logits-{number}-{rank}.safetensors")
    met.close()


if __name__ == "__main__":
    main()
