"""Who this process is, from a launcher's variables; and devices that a laptop does not have."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from mtx.errors import UserError
from mtx.train.launch import Cluster, find_cluster, join_cluster, use_virtual_devices

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


def test_nothing_in_the_environment_is_one_process():
    assert find_cluster({}) is None
    assert find_cluster({"HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None


def test_jax_variables():
    assert find_cluster(JAX) == Cluster(
        launcher="JAX", coordinator="10.0.0.1:1234", processes=4, process=2
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
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS=host:port"):
        find_cluster(silent)
    given = find_cluster(silent | {"JAX_COORDINATOR_ADDRESS": "n1:99"})
    assert (given.launcher, given.coordinator) == ("Open MPI", "n1:99")


def test_first_match_wins():
    assert find_cluster(JAX | TORCHRUN | SLURM | OPEN_MPI).launcher == "JAX"
    assert find_cluster(TORCHRUN | SLURM | OPEN_MPI).launcher == "torchrun"
    assert find_cluster(SLURM | OPEN_MPI).launcher == "SLURM"


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({}, (1,)),  # nothing known: one each
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
    ("environment", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "not JAX_NUM_PROCESSES, JAX_PROCESS_ID"),
        (JAX | {"JAX_PROCESS_ID": "4"}, "process 4 of 4; processes count from 0"),
        (JAX | {"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES='four', which is no number"),
    ],
)
def test_variables_that_cannot_be(environment, message):
    with pytest.raises(UserError, match=message):
        find_cluster(environment)


def test_join_cluster_alone(monkeypatch):
    for name in JAX | TORCHRUN | SLURM | OPEN_MPI:
        monkeypatch.delenv(name, raising=False)
    assert join_cluster() == "one process"


# -- virtual devices -------------------------------------------------------------------------------


def test_virtual_devices_keep_what_the_environment_sets(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=7")
    monkeypatch.setenv("NPROC", "5")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    use_virtual_devices(2)
    flags = "--xla_dump_to=x --xla_force_host_platform_device_count=7"
    assert (os.environ["XLA_FLAGS"], os.environ["NPROC"]) == (flags, "5")
    assert os.environ["JAX_PLATFORMS"] == "tpu"


def test_virtual_devices_need_a_number():
    with pytest.raises(UserError, match="virtual devices=0 must be at least 1"):
        use_virtual_devices(0)


_SCRIPT = """
from mtx.train.launch import use_virtual_devices
{before}
use_virtual_devices(40)
import os, jax
print(jax.device_count(), jax.devices()[0].platform, os.environ["NPROC"])
try:
    use_virtual_devices(41)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("before", ["", "import jax"])
def test_virtual_devices_exist(before):
    names = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(before=before)],
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "40 cpu 40"
    assert second.startswith("JAX has already started with 40 devices, too few for 41; ")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="this C library is not glibc"
)
def test_what_is_freed_stays_with_the_process():
    code = """
import ctypes, sys
from mtx.train.launch import keep_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 256 * 2**20
before = resident_mib()
block = libc.malloc(ctypes.c_size_t(size))
ctypes.memset(block, 1, size)
libc.free(block)
print(resident_mib() - before)
"""
    command = [sys.executable, "-c", code]
    kept, given_back = (
        float(subprocess.run([*command, how], capture_output=True, check=True).stdout)
        for how in ("keep", "give back")
    )
    assert kept > 200 > 50 > given_back
