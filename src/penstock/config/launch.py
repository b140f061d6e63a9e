"""`Place`: where a launcher has put this process among the ranks of an engine.

`torchrun`, `srun` and `mpirun` start one process per rank, on all nodes, and say by environment
variables which is which. This module reads them, and nothing else of the environment.
"""

import importlib.util
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError

Launcher = Literal["auto", "local", "torchrun", "slurm", "mpi", "ray"]
SECRET_VARIABLE = "PENSTOCK_RANK_SECRET"
MIN_SECRET_LEN = 16
_DEFAULT_PORT = 29500  # torchrun's
_SLURM_PORTS = range(20_000, 29_000)  # below those that the system gives to connections
_WAY_OUT = "set launcher to local to start the ranks from here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    launcher: str
    rank: int
    size: int  # ranks on all nodes
    local_rank: int
    local_size: int  # ranks on this node
    host: str  # of rank 0, as the others reach it
    port: int  # where rank 0 takes the others
    node: str  # name of this node

    def __post_init__(self) -> None:
        if not (0 <= self.local_rank < self.local_size <= self.size and self.rank < self.size):
            raise ConfigError(
                f"{self.launcher} says rank {self.rank} of {self.size}, on its node "
                f"{self.local_rank} of {self.local_size}, which cannot be; {_WAY_OUT}"
            )

    @property
    def spans_nodes(self) -> bool:
        return self.local_size < self.size


def find_place(launcher: Launcher, env: Mapping[str, str] = os.environ) -> Place | None:
    """None: ranks are started from here. `auto`: the launcher that has started several, if any."""
    if launcher == "local":
        return None
    if launcher == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "ranks by Ray (orchestrator_type or launcher: ray) need its package: pip install "
                "'penstock[ray]'; or leave it out, and have torchrun, srun or mpirun start them"
            )
        return None
    for name, marks, read in _LAUNCHERS:
        if launcher in ("auto", name) and marks <= env.keys():
            place = read(env)
            return place if place.size > 1 or launcher != "auto" else None
    if launcher == "auto":
        return None
    names = " or ".join(
        ", ".join(sorted(marks)) for name, marks, _ in _LAUNCHERS if name == launcher
    )
    raise ConfigError(
        f"launcher is {launcher}, but the environment has no {names}; start 'penstock serve' by "
        f"it, or {_WAY_OUT}"
    )


def rank_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """What ranks know each other by."""
    secret = env.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_LEN:
        raise ConfigError(
            f"ranks that a launcher starts meet over the network and need a secret: set "
            f"{SECRET_VARIABLE} to the same {MIN_SECRET_LEN} or more characters on all nodes, such "
            f'as "$(openssl rand -hex 32)" before srun; or {_WAY_OUT}'
        )
    return secret.encode()


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes it: `gpu[03-05,9],login` begins with `gpu03`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodes)
    if found is None:
        raise ConfigError(f"'{nodes}' is no list of Slurm nodes; set MASTER_ADDR")
    return "".join(part or "" for part in found.groups())


def _torchrun(env: Mapping[str, str]) -> Place:
    return Place(
        launcher="torchrun",
        rank=_number(env, "RANK"),
        size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK"),
        local_size=_number(env, "LOCAL_WORLD_SIZE"),
        host=env["MASTER_ADDR"],
        port=_port(env, _DEFAULT_PORT),
        node=socket.gethostname(),
    )


def _slurm(env: Mapping[str, str]) -> Place:
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    job = _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
    return Place(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=_tasks_of_node(env, size),
        host=env.get("MASTER_ADDR") or first_host(nodes),
        port=_port(env, _SLURM_PORTS[job % len(_SLURM_PORTS)]),
        node=env.get("SLURMD_NODENAME") or socket.gethostname(),
    )


def _tasks_of_node(env: Mapping[str, str], size: int) -> int:
    """From `2(x3),1`, which is 2,2,2,1, one number for each node."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", str(size)).split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE: '{part}' is no number of tasks")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(env, "SLURM_NODEID")
    return counts[node] if node < len(counts) else size


def _open_mpi(env: Mapping[str, str]) -> Place:
    return _mpi(env, "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _hydra(env: Mapping[str, str]) -> Place:
    """MPICH and Intel MPI."""
    return _mpi(env, "PMI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi(env: Mapping[str, str], prefix: str, local_rank: str, local_size: str) -> Place:
    size, here = _number(env, f"{prefix}SIZE"), _number(env, local_size)
    host = env.get("MASTER_ADDR") or ("127.0.0.1" if here == size else "")
    if not host:
        raise ConfigError(
            f"mpirun has started {size} ranks, {here} of them on this node, and does not say where "
            "rank 0 is: give all of them MASTER_ADDR, as with 'mpirun -x MASTER_ADDR=HOST'"
        )
    return Place(
        launcher="mpi",
        rank=_number(env, f"{prefix}RANK"),
        size=size,
        local_rank=_number(env, local_rank),
        local_size=here,
        host=host,
        port=_port(env, _DEFAULT_PORT),
        node=socket.gethostname(),
    )


def _port(env: Mapping[str, str], default: int) -> int:
    """Beside MASTER_PORT: at that one torchrun itself may listen."""
    port = (_number(env, "MASTER_PORT") if env.get("MASTER_PORT") else default) + 1
    if not 1024 < port < 65536:
        raise ConfigError(f"MASTER_PORT is {port - 1}; ranks meet at the port after it")
    return port


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"{name} is '{text}' in the environment, not a number; {_WAY_OUT}")
    return int(text)


# The variables by which each is known, in this order: torchrun and mpirun may themselves be started
# by srun. SLURM_STEP_NUM_TASKS is in what srun has started, and not in the script of a job.
_LAUNCHERS: tuple[tuple[str, frozenset[str], Callable[[Mapping[str, str]], Place]], ...] = (
    ("torchrun", frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}), _torchrun),
    ("mpi", frozenset({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}), _open_mpi),
    ("mpi", frozenset({"PMI_RANK", "MPI_LOCALRANKID"}), _hydra),
    ("slurm", frozenset({"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}), _slurm),
)
