"""Which of a run's processes this is, from options or a launcher's variables. No JAX here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from mtx.errors import UserError
from mtx.fields import Between, resolve_types
from mtx.sizes import Devices

# Ports that the operating system hands out last; a job's id picks one, as jobs may share a node.
_FIRST_PORT, _PORTS = 61440, 4096
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What a launcher's variables would say, given by hand, and how long to wait for others."""

    coordinator: str | None = None  # host:port at which process 0 listens
    processes: Devices | None = None  # of the run, on all nodes
    process: Annotated[int, Between(0, 2**20)] | None = None  # this one, from 0
    local_devices: tuple[int, ...] | None = None  # GPUs of this node that this process uses
    connect_s: Annotated[int, Between(1, 10**7)] = 300  # for all processes to arrive

    def __post_init__(self):
        resolve_types(self, prefix="cluster.")
        given = self.coordinator, self.processes, self.process
        if None in given and given != (None, None, None):
            raise UserError(
                f"cluster.coordinator={self.coordinator}, cluster.processes={self.processes} and "
                f"cluster.process={self.process} go together; set all three, or none"
            )

    def cluster(self) -> Cluster | None:
        if self.coordinator is None or self.processes is None or self.process is None:
            return None
        return Cluster(
            launcher="options", coordinator=self.coordinator, processes=self.processes,
            process=self.process, local_gpus=self.local_devices,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """This process among those of one run."""

    launcher: str  # whose variables gave the rest
    coordinator: str  # host:port at which process 0 listens
    processes: int
    process: int
    local_gpus: tuple[int, ...] | None = None  # of its node; None: all that it sees

    def describe(self) -> str:
        gpus = ""
        if self.local_gpus is not None:
            gpus = f", to use GPU {','.join(map(str, self.local_gpus))} of its node"
        return f"found by {self.launcher}, coordinator {self.coordinator}{gpus}"


def find_cluster(
    environment: Mapping[str, str], options: ClusterOptions | None = None
) -> Cluster | None:
    """The first of these that is present; None if that is a single process, or if none is.

    1. `options`
    2. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, as Kubeflow and people set them;
       in place of the last, JOB_COMPLETION_INDEX, as Kubernetes numbers the pods of an indexed job
    3. torchrun: MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK
    4. SLURM, inside `srun`
    5. Open MPI, inside `mpirun`

    JAX_COORDINATOR_ADDRESS alone overrides the address that 4 and 5 find, which is loopback if
    all processes are on one host. A process that shares its node takes its part of the node's GPUs,
    unless the launcher has bound it to some, or JAX_LOCAL_DEVICE_IDS names them. Raises UserError
    if a launcher contradicts itself.
    """
    cluster = options.cluster() if options else None
    for needed, read in _LAUNCHERS:
        if cluster is None and all(name in environment for name in needed):
            cluster = read(environment)
    if cluster is None:
        given = [name for name in _JAX_VARIABLES if name in environment]
        missing = [name for name in _JAX_VARIABLES if name not in environment]
        if given:
            raise UserError(
                f"the environment has {', '.join(given)} but not {', '.join(missing)}; set all "
                "three, or none for a single process"
            )
        return None
    if not 0 <= cluster.process < cluster.processes:
        raise UserError(
            f"{cluster.launcher} says process {cluster.process} of {cluster.processes}; "
            "processes count from 0"
        )
    if not re.fullmatch(r".+:\d{1,5}", cluster.coordinator):
        raise UserError(
            f"{cluster.launcher} says coordinator {cluster.coordinator!r}; its form is host:port"
        )
    return cluster if cluster.processes > 1 else None


def _read_jax(environment: Mapping[str, str], index: str = "JAX_PROCESS_ID") -> Cluster:
    return Cluster(
        launcher=environment.get("MTX_LAUNCHER", "JAX_* variables"),
        coordinator=environment["JAX_COORDINATOR_ADDRESS"],
        processes=_integer(environment, "JAX_NUM_PROCESSES"), process=_integer(environment, index),
    )  # fmt: skip


def _read_kubernetes(environment: Mapping[str, str]) -> Cluster:
    return replace(_read_jax(environment, "JOB_COMPLETION_INDEX"), launcher="Kubernetes")


def _read_torchrun(environment: Mapping[str, str]) -> Cluster:
    port = _integer(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1  # torchrun's own store listens on MASTER_PORT
    return Cluster(
        launcher="torchrun", coordinator=f"{environment['MASTER_ADDR']}:{port}",
        processes=_integer(environment, "WORLD_SIZE"), process=_integer(environment, "RANK"),
        local_gpus=_part_of_node(
            environment, "LOCAL_RANK", _integer(environment, "LOCAL_WORLD_SIZE", 1)
        ),
    )  # fmt: skip


def _read_slurm(environment: Mapping[str, str]) -> Cluster:
    """Reads SLURM's variables of a job step; a batch script alone has only some of them."""
    job = _integer(environment, "SLURM_JOB_ID") + _integer(environment, "SLURM_STEP_ID", 0)
    # The first of a compressed list: node[007-015,020]-ib,other -> node007-ib
    nodes = environment["SLURM_STEP_NODELIST"]
    host = re.sub(r"\[(\w*)[^\]]*\]", r"\1", nodes).partition(",")[0]
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        host = _LOOPBACK
    # Tasks on each node: "2(x3),1" is three nodes of two tasks, then one of one.
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [
        int(count) for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(nodes or 1))
    ]  # fmt: skip
    node = min(_integer(environment, "SLURM_NODEID", 0), len(counts) - 1)
    return Cluster(
        launcher="SLURM", coordinator=_coordinator(environment, host, job),
        processes=_integer(environment, "SLURM_STEP_NUM_TASKS"),
        process=_integer(environment, "SLURM_PROCID"),
        local_gpus=_part_of_node(
            environment, "SLURM_LOCALID", counts[node],
            gpus=_integer(environment, "SLURM_GPUS_ON_NODE", 0) or None,
        ),
    )  # fmt: skip


def _read_open_mpi(environment: Mapping[str, str]) -> Cluster:
    processes = _integer(environment, "OMPI_COMM_WORLD_SIZE")
    local = _integer(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or ...;tcp6://[fe80::b9b,2620::2]:43370
    uri = re.match(
        r"(?P<job>\d+)\.\d+;(?:tcp://(?P<v4>[^,:]+)|tcp6://\[(?P<v6>[^,\]]+))",
        environment.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    host = uri and (uri["v4"] or f"[{uri['v6']}]")
    if local == processes:
        host = _LOOPBACK
    if host is None and "JAX_COORDINATOR_ADDRESS" not in environment and processes > 1:
        raise UserError(
            "this Open MPI does not say on which host process 0 runs; set "
            "JAX_COORDINATOR_ADDRESS=host:port with mpirun -x"
        )
    return Cluster(
        launcher="Open MPI", processes=processes,
        coordinator=_coordinator(environment, host, int(uri["job"]) >> 12 if uri else 0),
        process=_integer(environment, "OMPI_COMM_WORLD_RANK"),
        local_gpus=_part_of_node(environment, "OMPI_COMM_WORLD_LOCAL_RANK", local),
    )  # fmt: skip


_JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LAUNCHERS = (  # the variables that each sets, in the order in which they are tried
    (_JAX_VARIABLES, _read_jax),
    ((*_JAX_VARIABLES[:2], "JOB_COMPLETION_INDEX"), _read_kubernetes),
    (("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"), _read_torchrun),
    (("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), _read_slurm),
    (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), _read_open_mpi),
)


def _coordinator(environment: Mapping[str, str], host: str | None, job: int) -> str:
    found = f"{host}:{_FIRST_PORT + job % _PORTS}"
    return environment.get("JAX_COORDINATOR_ADDRESS", found)


def _part_of_node(
    environment: Mapping[str, str], local: str, processes: int, gpus: int | None = None
) -> tuple[int, ...] | None:
    """The GPUs of this process, one of `processes` on its node; `local` names the variable with its
    number there, and `gpus` is how many the node has, if known.

    None, which means all that it sees, for a process that has the node to itself or was bound to
    some of its GPUs.
    """
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    named = [environment[name].split(",") for name in names if environment.get(name)]
    visible, process = len(named[0]) if named else gpus, _integer(environment, local, 0)
    if processes == 1 or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    if visible is None:
        return (process,)
    if visible < max(processes, gpus or 0):
        return None  # bound to its own
    each = visible // processes
    return tuple(range(process * each, (process + 1) * each))


def _integer(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text!r} of the environment must be a number") from None
