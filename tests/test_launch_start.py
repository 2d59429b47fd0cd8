"""Processes of one machine: their devices, how they connect, and one fault from start to end."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from errors import names

from mtx.errors import UserError
from mtx.launch import start
from mtx.launch.start import _own_address, _refuse_taken_port, join_cluster, use_virtual_devices
from mtx.train import memory

# The C library's own malloc, not the one that `conftest.py` preloads.
GLIBC = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


@pytest.fixture
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("JAX_COORD", "JAX_NUM_P", "JAX_PROC", "SLURM_", "OMPI_", "MASTER_")):
            monkeypatch.delenv(name)


def test_join_cluster_alone(no_launcher):
    assert join_cluster() is None


def test_a_taken_port_is_refused():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError) as error:
            _refuse_taken_port(address)
        assert names(error, f"{address}")
    _refuse_taken_port(address)


def test_own_address_is_that_of_the_way_to_the_other():
    assert _own_address("127.0.0.1:80") == "127.0.0.1"


# -- virtual devices -------------------------------------------------------------------------------


def test_virtual_devices_keep_what_the_environment_sets(monkeypatch):
    monkeypatch.setattr(start, "_started_jax", lambda: True)  # leaves JAX's config alone
    monkeypatch.setattr(start, "_device_count", lambda: 7)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=7")
    monkeypatch.setenv("NPROC", "5")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    use_virtual_devices(2)
    flags = "--xla_dump_to=x --xla_force_host_platform_device_count=7"
    assert (os.environ["XLA_FLAGS"], os.environ["NPROC"]) == (flags, "5")
    assert os.environ["JAX_PLATFORMS"] == "tpu"


def test_virtual_devices_need_a_number():
    with pytest.raises(UserError) as error:
        use_virtual_devices(0)
    assert names(error, "devices=0", 1)
    with pytest.raises(UserError) as error:
        use_virtual_devices(100000)
    assert names(error, "devices=100000", "8,192")


_SCRIPT = """
from mtx.launch.start import use_virtual_devices
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
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"40 cpu {40 + start.usable_cores()}"
    assert second.startswith("JAX has already started with 40 devices, too few for 41; ")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="this C library is not glibc"
)
def test_what_is_freed_stays_with_the_process():
    code = """
import ctypes, sys
from mtx.launch.start import give_freed_memory_back, keep_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if "keep" in sys.argv:
    keep_freed_memory()
if "give back" in sys.argv:
    give_freed_memory_back()
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
    kept, given_back, as_it_comes = (
        float(subprocess.run([*command, *how], env=GLIBC, capture_output=True, check=True).stdout)
        for how in (["keep"], ["keep", "give back"], [])
    )
    assert kept > 200 > 50 > max(given_back, as_it_comes)


@pytest.mark.parametrize(("temp_bytes", "spared"), [(1 << 20, False), (1 << 40, True)])
def test_a_program_too_large_to_keep_gives_its_memory_back(monkeypatch, temp_bytes, spared):
    called = []
    monkeypatch.setattr(memory, "give_freed_memory_back", lambda: called.append(True))
    assert memory.spare_memory(SimpleNamespace(temp_size_in_bytes=temp_bytes)) == spared
    assert called == [True] * spared


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    or not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="another C library, or a kernel without huge pages",
)
def test_the_heap_is_of_huge_pages():
    """Pages that the kernel may make huge have `hg` among their flags."""
    code = r"""
import re
from mtx.launch.start import keep_freed_memory
keep_freed_memory()
maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read())
print(sum(
    int(re.search(r"Size: +(\d+) kB", text)[1])
    for text in maps if "[heap]" in text and re.search("VmFlags:.* hg", text)
))
"""
    done = subprocess.run([sys.executable, "-c", code], env=GLIBC, capture_output=True, check=True)
    assert int(done.stdout) > 1_000_000  # kB
