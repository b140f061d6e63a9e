"""A rank that meets the others over gloo, so that two ranks can share one GPU: for `tp_check`."""

from typing import Any
from unittest.mock import patch

import torch

from penstock.parallel.mesh import RankMesh
from penstock.types.mesh import MeshShape

create = RankMesh.create


def create_over_gloo(
    rank: int, shape: MeshShape, init_address: str, device: torch.device, **further: Any
) -> RankMesh:
    return create(rank, shape, init_address, torch.device("cpu"), **further)


def use_gloo() -> None:
    patch.object(RankMesh, "create", create_over_gloo).start()


if __name__ == "__main__":
    from penstock.runtime.worker import main

    use_gloo()
    main()
