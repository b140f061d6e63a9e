"""A single rank needs no process group; its collectives change nothing. Two: tests/models."""

import torch
import torch.distributed as dist

from penstock.parallel.collectives import all_gather, all_reduce
from penstock.parallel.mesh import ROLES, RankMesh


def test_single_rank_collectives_are_the_identity():
    mesh = RankMesh.single()
    x = torch.randn(3, 4)
    for name in ROLES:
        assert all_reduce(x, mesh.role(name)) is x
        assert all_gather(x, mesh.role(name)) is x


def test_mesh_of_one_starts_no_process_group():
    mesh = RankMesh.create(0, 1, "127.0.0.1:1", torch.device("cpu"))
    assert (mesh.rank, mesh.size) == (0, 1)
    assert not dist.is_initialized()
    mesh.close()
