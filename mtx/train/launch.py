"""Before JAX starts: virtual CPU devices on a laptop, and many processes on a cluster.

Nothing here imports JAX until it is called, since some settings are read once, when JAX starts.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtx.errors import UserError

_MMAP_MAX, _TRIM_THRESHOLD, _ARENA_MAX = -4, -1, -8  # of mallopt(3)
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Ports that the operating system hands out last; jobs that share a node differ by their ids.
_FIRST_PORT, _PORTS = 61440, 4096


def use_virtual_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices, in place of the machine's own.

    To be called before JAX starts. What the environment already sets is kept: XLA's flag,
    JAX_PLATFORMS and NPROC. Raises UserError where JAX has already started with fewer devices.
    """
    if count < 1:
        raise UserError(f"virtual devices={count} must be at least 1")
    if _started_jax() and _device_count() < count:
        raise UserError(
            f"JAX has already started with {_device_count()} devices, too few for {count}; ask for "
            f"virtual devices before anything is computed, or set XLA_FLAGS={_DEVICE_COUNT}={count}"
        )
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The size of XLA's thread pool. A collective blocks one thread per device: with too few of
    # them, those that wait keep those that are waited for from running, and the program hangs.
    os.environ.setdefault("NPROC", str(max(32, count)))
    if "jax" in sys.modules and not _started_jax():
        import jax  # it has read this variable already, when it was imported

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Has the C library keep what is freed, in one heap, for the next that asks; glibc only.

    XLA's CPU client frees a step's temporary buffers at its end. glibc gives blocks of that size
    back to the system, and the next step pays a page fault for every 4 KiB that it writes: with
    bench-s on four devices, 0.25 s of the system's time a step and 7 % of all CPU time.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be opened
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        mallopt(option, value)


def _started_jax() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _device_count() -> int:
    import jax

    return jax.device_count()


# -- many processes --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """This process among those of one run."""

    launcher: str  # whose variables said so
    coordinator: str  # host:port at which process 0 listens
    processes: int
    process: int
    local_gpus: tuple[int, ...] | None = None  # of its node; None: all that it sees

    def describe(self) -> str:
        gpus = ""
        if self.local_gpus is not None:
            gpus = f", to use GPU {','.join(map(str, self.local_gpus))} of its node"
        return (
            f"process {self.process} of {self.processes}, coordinator {self.coordinator}, from "
            f"{self.launcher}'s variables{gpus}"
        )


def join_cluster() -> str:
    """Connects this process with the others of its run, and says in one line what it found.

    To be called before JAX computes anything; does nothing where there is one process. The
    launcher's variables are read as `find_cluster` says. Raises UserError where they contradict
    themselves.
    """
    cluster = find_cluster(os.environ)
    if cluster is None:
        return "one process"
    import jax

    if not jax.distributed.is_initialized():
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.processes,
            process_id=cluster.process,
            local_device_ids=cluster.local_gpus,
            cluster_detection_method="deactivate",  # `find_cluster` has done it
        )
    return cluster.describe()


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The first of these that `environment` holds; None where that is one process, or nothing.

    1. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, as Kubeflow and people set them
    2. torchrun: MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK
    3. SLURM, inside of `srun`
    4. Open MPI, inside of `mpirun`

    JAX_COORDINATOR_ADDRESS alone overrides the address that 3 and 4 find. A process that shares
    its node takes its part of the node's GPUs, unless the launcher has bound it to some, or
    JAX_LOCAL_DEVICE_IDS names them.
    """
    readers: tuple[Callable, ...] = (_read_jax, _read_torchrun, _read_slurm, _read_open_mpi)
    cluster = next(filter(None, (read(environment) for read in readers)), None)
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
            f"{cluster.launcher}'s variables say process {cluster.process} of {cluster.processes}; "
            "processes count from 0"
        )
    return cluster if cluster.processes > 1 else None


_JAX_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def _read_jax(environment: Mapping[str, str]) -> Cluster | None:
    if not all(name in environment for name in _JAX_VARIABLES):
        return None
    return Cluster(
        launcher="JAX",
        coordinator=environment["JAX_COORDINATOR_ADDRESS"],
        processes=_integer(environment, "JAX_NUM_PROCESSES"),
        process=_integer(environment, "JAX_PROCESS_ID"),
    )


def _read_torchrun(environment: Mapping[str, str]) -> Cluster | None:
    needed = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(name in environment for name in needed):
        return None
    port = _integer(environment, "MASTER_PORT")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1  # torchrun's own store listens on MASTER_PORT
    return Cluster(
        launcher="torchrun",
        coordinator=f"{environment['MASTER_ADDR']}:{port}",
        processes=_integer(environment, "WORLD_SIZE"),
        process=_integer(environment, "RANK"),
        local_gpus=_part_of_node(
            environment,
            process=_integer(environment, "LOCAL_RANK", 0),
            processes=_integer(environment, "LOCAL_WORLD_SIZE", 1),
        ),
    )


def _read_slurm(environment: Mapping[str, str]) -> Cluster | None:
    """SLURM's variables of a step: a batch script has some of them without being one."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if not all(name in environment for name in needed):
        return None
    job = _integer(environment, "SLURM_JOB_ID") + _integer(environment, "SLURM_STEP_ID", 0)
    host = _first_host(environment["SLURM_STEP_NODELIST"])
    return Cluster(
        launcher="SLURM",
        coordinator=_coordinator(environment, host, job),
        processes=_integer(environment, "SLURM_STEP_NUM_TASKS"),
        process=_integer(environment, "SLURM_PROCID"),
        local_gpus=_part_of_node(
            environment,
            process=_integer(environment, "SLURM_LOCALID", 0),
            processes=_tasks_of_node(environment),
            gpus=_integer(environment, "SLURM_GPUS_ON_NODE", 0) or None,
        ),
    )


def _first_host(nodes: str) -> str:
    """The first of SLURM's compressed list: node[007-015,020]-ib,other -> node007-ib"""
    prefix, first, suffix = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes).groups()
    return prefix + (first or "") + (suffix or "")


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """Of SLURM's "2(x3),1": three nodes of two tasks, then one of one."""
    counts = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, nodes = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part).groups()
        counts += [int(count)] * int(nodes or 1)
    node = _integer(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def _read_open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if not all(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")):
        return None
    processes = _integer(environment, "OMPI_COMM_WORLD_SIZE")
    # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911 or ...;tcp6://[fe80::b9b,2620::2]:43370
    uri = re.match(
        r"(?P<job>\d+)\.\d+;(?:tcp://(?P<v4>[^,:]+)|tcp6://\[(?P<v6>[^,\]]+))",
        environment.get("OMPI_MCA_orte_hnp_uri", ""),
    )
    host = uri and (uri["v4"] or f"[{uri['v6']}]")
    if host is None and "JAX_COORDINATOR_ADDRESS" not in environment and processes > 1:
        raise UserError(
            "this Open MPI does not say on which host process 0 runs; set "
            "JAX_COORDINATOR_ADDRESS=host:port with mpirun -x"
        )
    return Cluster(
        launcher="Open MPI",
        coordinator=_coordinator(environment, host, int(uri["job"]) >> 12 if uri else 0),
        processes=processes,
        process=_integer(environment, "OMPI_COMM_WORLD_RANK"),
        local_gpus=_part_of_node(
            environment,
            process=_integer(environment, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
            processes=_integer(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1),
        ),
    )


def _coordinator(environment: Mapping[str, str], host: str | None, job: int) -> str:
    found = f"{host}:{_FIRST_PORT + job % _PORTS}"
    return environment.get("JAX_COORDINATOR_ADDRESS", found)


def _part_of_node(
    environment: Mapping[str, str], *, process: int, processes: int, gpus: int | None = None
) -> tuple[int, ...] | None:
    """The GPUs of one of the `processes` on a node that has `gpus` of them, where that is known.

    None, which is all that it sees, for a process that has the node for itself or was bound to
    some of its GPUs.
    """
    visible = next(
        (
            len(environment[name].split(","))
            for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if environment.get(name)
        ),
        gpus,
    )
    if processes == 1 or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    if visible is None:
        return (process,)
    if visible < max(processes, gpus or 0):
        return None  # bound to its own
    each = visible // processes
    return tuple(range(process * each, (process + 1) * each))


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise UserError(f"the environment has {name}={text!r}, which is no number") from None
