"""Before JAX starts: virtual CPU devices on a laptop, and many processes on a cluster.

Nothing here imports JAX until it is called, since some settings are read once, when JAX starts.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import sys
from typing import Annotated, Any

from mtx.errors import UserError, reason
from mtx.fields import Between, checked
from mtx.launch.cluster import Cluster, ClusterOptions, find_cluster
from mtx.launch.exits import LostProcess
from mtx.sizes import MOST_VIRTUAL

_MMAP_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -4, -3, -1, -8  # of mallopt(3)
_HUGE, _HUGE_PAGE = 14, 2 << 20  # of madvise(2); bytes
_HEAP_BYTES = 8 << 30  # of address space: no memory is taken before it is used
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# JAX's own watch over its processes is turned off in effect (see `mtx.launch.watch` for ours): it
# goes by the time of day, so a clock set forward by more than its patience would end the run.
_HEARTBEAT_S = 10**9
_SHUTDOWN_S = 120  # for the others to finish, once this process has


def use_virtual_devices(count: int) -> None:
    """Makes the CPU appear as `count` devices, in place of the machine's own.

    To be called before JAX starts. What the environment already sets is kept: XLA's flag,
    JAX_PLATFORMS and NPROC. Raises UserError if JAX has already started with fewer devices.
    """
    checked("virtual devices", count, Annotated[int, Between(1, MOST_VIRTUAL)])
    if _started_jax() and _device_count() < count:
        raise UserError(
            f"JAX has already started with {_device_count()} devices, too few for {count}; ask for "
            f"virtual devices before anything is computed, or set XLA_FLAGS={_DEVICE_COUNT}={count}"
        )
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The size of XLA's thread pools. A collective blocks a thread of each device, and never two,
    # since a device's collectives run in order: with no more threads than devices, threads that
    # wait can keep those that they wait for from running, and the program hangs. The others
    # compute, one for each core: with 8 threads instead of 6, for four devices on two cores, a step
    # of bench-s took 11 % longer at the median of six pairs.
    os.environ.setdefault("NPROC", str(count + usable_cores()))
    if "jax" in sys.modules and not _started_jax():
        import jax  # it has read this variable already, when it was imported

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory, in one heap of huge pages, for later allocations;
    glibc on Linux only.

    XLA's CPU client frees a step's temporary buffers at its end, and glibc gives blocks of that
    size back to the system: the next step pays a page fault for every 4 KiB (bench-s on four
    devices: 7 % of all CPU time; pages of 2 MiB saved another 4 to 19 % of a step). The heap is
    larger than four devices' bench-s needs: what it grows by later is in small pages.

    It costs memory: glibc 2.36 seldom puts an aligned block where one of the same size has been,
    so within some ten steps the heap grows to 3.5 times the temporary buffers of all devices. See
    `give_freed_memory_back`.
    """
    if (libc := _glibc()) is None:
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    end, size = libc.sbrk(0), _HEAP_BYTES
    while size and not (block := libc.malloc(ctypes.c_size_t(size))):
        size //= 2
    libc.free(ctypes.c_void_p(block))
    first = -(-end // _HUGE_PAGE) * _HUGE_PAGE
    if (size := libc.sbrk(0) - first) > 0:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _HUGE)


def give_freed_memory_back() -> None:
    """Undoes `keep_freed_memory` for later allocations: blocks of 1 MiB or more are returned to the
    system when they are freed."""
    if (libc := _glibc()) is not None:
        for option, value in ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 1 << 20)):
            libc.mallopt(option, value)
        libc.malloc_trim(ctypes.c_size_t(0))  # the heap's free end, which would serve them first


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        return libc if libc.mallopt and libc.sbrk and libc.madvise else None
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be opened
        return None


def usable_cores() -> int:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _started_jax() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _device_count() -> int:
    import jax

    return jax.device_count()


# -- many processes --------------------------------------------------------------------------------


def join_cluster(options: ClusterOptions | None = None) -> str | None:
    """Connects this process with the others of its run, and returns a line on what it found; with
    a single process, does nothing and returns None.

    To be called before JAX computes anything. `find_cluster` says which process this is. Process 0
    listens only at the coordinator's address (JAX_COORDINATOR_BIND_ADDRESS names another), and CPU
    collectives only at the address with which each process reaches the coordinator. Raises
    UserError for variables that contradict each other, and LostProcess if the processes do not
    connect.
    """
    options = options or ClusterOptions()
    cluster = find_cluster(os.environ, options)
    if cluster is None:
        return None
    import jax

    if not jax.distributed.is_initialized():
        _connect(cluster, options)
    local = jax.local_devices()
    ids = ",".join(str(device.id) for device in local)
    return (
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, pid "
        f"{os.getpid()}: {len(local)} of {jax.device_count()} devices ({local[0].device_kind} "
        f"{ids}), {cluster.describe()}"
    )


def _connect(cluster: Cluster, options: ClusterOptions) -> None:
    import jax

    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", cluster.coordinator)
    if cluster.process == 0:
        _refuse_taken_port(bind)
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator, coordinator_bind_address=bind,
            num_processes=cluster.processes, process_id=cluster.process,
            local_device_ids=cluster.local_gpus, initialization_timeout=options.connect_s,
            cluster_detection_method="deactivate",  # `find_cluster` has done it
            heartbeat_timeout_seconds=_HEARTBEAT_S, shutdown_timeout_seconds=_SHUTDOWN_S,
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        raise LostProcess(
            f"process {cluster.process} of {cluster.processes} on {socket.gethostname()} did not "
            f"meet the others at {cluster.coordinator} within {options.connect_s} s: "
            + reason(error)
        ) from error
    options_of_jax: Any = jax.config  # its type lacks some of its flags
    if options_of_jax.jax_cpu_collectives_implementation == "gloo":
        _listen_only_at(_own_address(cluster.coordinator))


def _socket(address: str, kind: socket.SocketKind) -> tuple[socket.socket, Any]:
    """A socket for a host:port, and what to bind or to connect it to."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=kind)[0]
    return socket.socket(*found[:3]), found[4]


def _refuse_taken_port(address: str) -> None:
    """UserError if process 0 cannot listen at `address`, where the C++ service would abort."""
    try:
        listener, place = _socket(address, socket.SOCK_STREAM)
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen at {address} ({error.strerror}); process 0 must run on the "
            "coordinator's host with a free port, or JAX_COORDINATOR_BIND_ADDRESS=address:port "
            "must say where to listen"
        ) from error


def _own_address(coordinator: str) -> str | None:
    """This host's address on the way to the coordinator; loopback if that is this host itself."""
    try:
        probe, place = _socket(coordinator, socket.SOCK_DGRAM)
        with probe:
            probe.connect(place)  # of a datagram socket: nothing is sent
            return probe.getsockname()[0]
    except OSError:
        return None


def _listen_only_at(address: str | None) -> None:
    """Makes gloo, which moves data between CPUs, listen at `address` of this host.

    By default it takes whatever the host's name resolves to: on many machines 127.0.1.1, where no
    other host reaches it, or else an external address, even when all processes are on one host.
    JAX (0.10 to 0.12) has the argument, but no public way to set it.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    collectives = _jax.make_gloo_tcp_collectives(
        distributed_client=distributed.global_state.client, hostname=address
    )
    factory = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
    xla_bridge.register_backend_factory("cpu", factory, priority=0, fail_quietly=False)
