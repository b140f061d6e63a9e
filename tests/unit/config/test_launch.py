"""Places among ranks, read from what torchrun, srun and mpirun put into the environment."""

import pytest

from penstock.config.launch import find_place, first_host, rank_secret
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[03-05],other",
    "SLURMD_NODENAME": "gpu05",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}


def place(env, launcher="auto"):
    found = find_place(launcher, env)
    assert found is not None
    return found.launcher, found.rank, found.size, found.local_rank, found.local_size


def test_each_launcher_is_known_by_its_environment():
    assert place(TORCHRUN) == ("torchrun", 3, 4, 1, 2)
    assert place(SLURM) == ("slurm", 4, 5, 0, 1)
    assert place(OPEN_MPI) == ("mpi", 1, 2, 1, 2)
    assert place(HYDRA | {"MASTER_ADDR": "a"}) == ("mpi", 1, 2, 0, 1)
    # Those that srun has started win over it, unless it is asked for.
    assert place(SLURM | TORCHRUN)[0] == "torchrun"
    assert place(SLURM | OPEN_MPI)[0] == "mpi"
    assert place(SLURM | TORCHRUN, "slurm")[0] == "slurm"


def test_ranks_meet_where_rank_0_is_beside_the_launchers_own_port():
    found = find_place("auto", TORCHRUN)
    assert found is not None and found.spans_nodes
    assert (found.host, found.port) == ("10.0.0.1", 29401)
    found = find_place("auto", SLURM)
    assert found is not None
    assert (found.host, found.node, found.port) == ("gpu03", "gpu05", 20018)
    found = find_place("auto", SLURM | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "3000"})
    assert found is not None and (found.host, found.port) == ("10.0.0.9", 3001)
    found = find_place("auto", OPEN_MPI)
    assert found is not None and not found.spans_nodes and found.host == "127.0.0.1"


@pytest.mark.parametrize(
    "env",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1",
                 "SLURM_NODEID": "0"},
        # The script of a job of four tasks is not one of them.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ],
)  # fmt: skip
def test_without_several_ranks_nobody_but_us_starts_them(env):
    assert find_place("auto", env) is None
    assert find_place("local", TORCHRUN) is None


@pytest.mark.parametrize(
    ("launcher", "env", "says"),
    [
        ("torchrun", SLURM, "launcher is torchrun, but the environment has no LOCAL_RANK"),
        ("auto", TORCHRUN | {"RANK": "x"}, "RANK is 'x' in the environment, not a number"),
        ("auto", TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        ("auto", TORCHRUN | {"MASTER_PORT": "65535"}, "MASTER_PORT is 65535"),
        ("auto", HYDRA, "mpirun -x MASTER_ADDR=HOST"),
        ("auto", SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, "'2x' is no number of tasks"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(launcher, env, says):
    with pytest.raises(ConfigError, match="(?s).*" + says.replace("(", r"\(")):
        find_place(launcher, env)


def test_a_secret_is_needed_and_not_a_short_one():
    assert rank_secret({"PENSTOCK_RANK_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    for env in ({}, {"PENSTOCK_RANK_SECRET": "short"}):
        with pytest.raises(ConfigError, match="set PENSTOCK_RANK_SECRET"):
            rank_secret(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-05,9]", "gpu03"), ("n[1,3]-x,m", "n1-x"), ("n[7]", "n7")],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_host(nodes) == first


def test_ray_that_is_not_installed_is_refused_before_a_model_is_fetched(monkeypatch):
    config = EngineConfig(orchestrator_type="Ray")
    assert config.launcher == "ray"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[ray\]'; or leave it out"):
        find_place(config.launcher, SLURM)
    with pytest.raises(ConfigError, match="orchestrator_type is ray and launcher is slurm"):
        EngineConfig(orchestrator_type="ray", launcher="slurm")
    assert EngineConfig(orchestrator_type="mpi").launcher == "auto"
