"""A rank that meets the others over gloo, so that two ranks can share one GPU: for `tp_check`."""

import torch
import torch.distributed as dist

from penstock.parallel.mesh import ROLES, RankMesh, RoleGroup


def create_over_gloo(rank: int, size: int, init_address: str, device: torch.device) -> RankMesh:
    if size == 1:
        return RankMesh.single()
    dist.init_process_group("gloo", init_method=f"tcp://{init_address}", rank=rank, world_size=size)
    return RankMesh(rank, size, dict.fromkeys(ROLES, RoleGroup(size, rank, dist.group.WORLD)))


def use_gloo() -> None:
    RankMesh.create = staticmethod(create_over_gloo)


if __name__ == "__main__":
    from penstock.runtime.worker import main

    use_gloo()
    main()
