"""The identity of this process, from options or a launcher's variables."""

from __future__ import annotations

import pytest
from errors import names

from mtx.errors import UserError
from mtx.launch.cluster import Cluster, ClusterOptions, find_cluster

JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}
TORCHRUN = {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]-ib,other",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
    "SLURM_NODEID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


BY_HAND = ClusterOptions(coordinator="c:7", processes=2, process=1, local_devices=(4, 5))


def test_options_come_first():
    assert find_cluster(JAX, BY_HAND) == Cluster(
        launcher="options", coordinator="c:7", processes=2, process=1, local_gpus=(4, 5)
    )
    assert find_cluster(JAX, ClusterOptions()).launcher == "JAX_* variables"
    with pytest.raises(UserError) as error:
        ClusterOptions(coordinator="c:7")
    assert names(error, "processes=None", "cluster.process=None")


def test_kubernetes_numbers_its_pods():
    pod = {name: value for name, value in JAX.items() if name != "JAX_PROCESS_ID"}
    assert find_cluster(pod | {"JOB_COMPLETION_INDEX": "3"}) == Cluster(
        launcher="Kubernetes", coordinator="10.0.0.1:1234", processes=4, process=3
    )


def test_one_host_keeps_to_loopback():
    slurm = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5"}
    assert find_cluster(slurm).coordinator == "127.0.0.1:61446"
    several = find_cluster(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert several.coordinator.startswith("127.0.0.1:")
    given = {"JAX_COORDINATOR_ADDRESS": "n1:99"}
    assert find_cluster(slurm | given).coordinator == "n1:99"


def test_nothing_in_the_environment_is_one_process():
    assert find_cluster({}) is None
    assert find_cluster({"HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None


def test_jax_variables():
    assert find_cluster(JAX) == Cluster(
        launcher="JAX_* variables", coordinator="10.0.0.1:1234", processes=4, process=2
    )


def test_torchrun():
    assert find_cluster(TORCHRUN) == Cluster(
        launcher="torchrun", coordinator="node-a:29500", processes=16, process=11, local_gpus=(3,)
    )


def test_torchrun_itself_listens_on_its_port():
    cluster = find_cluster(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert cluster.coordinator == "node-a:29501"


def test_slurm_with_one_task_a_node_takes_the_whole_node():
    assert find_cluster(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == Cluster(
        launcher="SLURM", coordinator="gpu007-ib:61446", processes=5, process=3
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-04]", "n01"),
        ("n[3,5-6],m", "n3"),
        ("a-b-3,c", "a-b-3"),
    ],
)
def test_slurm_coordinator_is_the_first_node(nodes, host):
    cluster = find_cluster(SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert cluster.coordinator.rpartition(":")[0] == host


def test_open_mpi():
    assert find_cluster(OPEN_MPI) == Cluster(
        launcher="Open MPI", coordinator=f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}",
        processes=2, process=1,
    )  # fmt: skip
    uri = {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"}
    assert find_cluster(OPEN_MPI | uri).coordinator == "[fe80::b9b:ac5d]:61441"


def test_open_mpi_without_an_address_says_what_to_set():
    silent = {name: value for name, value in OPEN_MPI.items() if "uri" not in name}
    with pytest.raises(UserError) as error:
        find_cluster(silent)
    assert names(error, "JAX_COORDINATOR_ADDRESS=host:port")
    given = find_cluster(silent | {"JAX_COORDINATOR_ADDRESS": "n1:99"})
    assert (given.launcher, given.coordinator) == ("Open MPI", "n1:99")


def test_first_match_wins():
    assert find_cluster(JAX | TORCHRUN | SLURM | OPEN_MPI).launcher == "JAX_* variables"
    assert find_cluster(TORCHRUN | SLURM | OPEN_MPI).launcher == "torchrun"
    assert find_cluster(SLURM | OPEN_MPI).launcher == "SLURM"


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, (1,)),  # nothing known: one GPU each
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4, 5, 6, 7)),
        ({"SLURM_GPUS_ON_NODE": "8"}, (4, 5, 6, 7)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, None),  # bound by the launcher
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}, None),
        ({"JAX_LOCAL_DEVICE_IDS": "0"}, None),  # JAX reads it itself
    ],
)
def test_two_tasks_of_a_node_share_its_gpus(environment, gpus):
    two = {"SLURM_STEP_TASKS_PER_NODE": "1,2(x2)", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}
    assert find_cluster(SLURM | two | environment).local_gpus == gpus


@pytest.mark.parametrize(
    "one",
    [
        JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_cluster_of_one_is_no_cluster(one):
    assert find_cluster(one) is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")),
        (JAX | {"JAX_PROCESS_ID": "4"}, ("process 4", "4;")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "host"}, ("'host'", "host:port")),
        (JAX | {"JAX_NUM_PROCESSES": "four"}, ("JAX_NUM_PROCESSES='four'",)),
    ],
)
def test_variables_that_cannot_be(environment, named):
    with pytest.raises(UserError) as error:
        find_cluster(environment)
    assert names(error, *named)
