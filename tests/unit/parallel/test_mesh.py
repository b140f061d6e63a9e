"""Places of ranks in a mesh, and a process group of one rank. Several ranks: tests/models."""

import socket

import pytest
import torch
import torch.distributed as dist

from penstock.parallel.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather_tokens,
    scatter_sums,
)
from penstock.parallel.mesh import ROLES, RankMesh
from penstock.types.mesh import MeshShape

CPU = torch.device("cpu")


def test_single_rank_collectives_are_the_identity():
    mesh = RankMesh.single()
    x = torch.randn(3, 4)
    for name in ROLES:
        role = mesh.role(name)
        assert all_reduce(x, role) is all_gather(x, role) is broadcast(x, role) is x
        assert gather_tokens(x, role, (3,)) is scatter_sums(x, role, (3,)) is x


def test_mesh_of_one_starts_no_process_group():
    mesh = RankMesh.create(0, MeshShape(), "127.0.0.1:1", CPU)
    assert (mesh.rank, mesh.shape.size) == (0, 1)
    assert not dist.is_initialized()
    mesh.close()


def test_one_rank_may_go_through_a_process_group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    mesh = RankMesh.create(0, MeshShape(), address, CPU, lone_roles=("attention", "tokens"))
    try:
        x = torch.randn(3, 4)
        tokens = mesh.role("tokens")
        assert mesh.role("attention").group is tokens.group is dist.group.WORLD
        assert mesh.role("vocab").group is None
        for counts in (None, (3,)):
            gathered = gather_tokens(x, tokens, counts)
            assert gathered is not x and torch.equal(gathered, x)
            assert torch.equal(scatter_sums(gathered, tokens, counts), x)
        assert torch.equal(all_reduce(x.clone(), mesh.role("attention")), x)
    finally:
        mesh.close()
    assert not dist.is_initialized()


def test_ranks_that_have_not_met_send_nothing():
    x = torch.zeros(1, 1)
    with pytest.raises(AssertionError, match="2 ranks have not met"):
        all_reduce(x, RankMesh.place(0, MeshShape(tp=2)).role("attention"))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (MeshShape(tp=4), {"attention": 4, "vocab": 4, "mlp": 4, "experts": 4, "tokens": 1}),
        (MeshShape(dp=4), {"attention": 1, "vocab": 1, "mlp": 4, "experts": 4, "tokens": 4}),
        (MeshShape(dp=2, tp=2), {"attention": 2, "mlp": 4, "experts": 4, "tokens": 2}),
        (
            MeshShape(cp=4, tp=2, ep=2),
            {"attention": 2, "vocab": 8, "mlp": 8, "experts": 8, "context": 4, "copies": 8},
        ),
        (MeshShape(pp=3, tp=2), {"attention": 2, "mlp": 2, "experts": 2, "tokens": 1}),
    ],
)
def test_a_role_spans_its_axes(shape, sizes):
    for rank in range(shape.size):
        mesh = RankMesh.place(rank, shape)
        assert {role: mesh.role(role).size for role in sizes} == sizes
    sampling = [r for r in range(shape.size) if RankMesh.place(r, shape).is_sampling_rank]
    last_stage = shape.size - shape.stage_size
    assert sampling == list(range(last_stage, shape.size, shape.cp * shape.tp))
