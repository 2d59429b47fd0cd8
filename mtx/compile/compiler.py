"""The compiler on this machine that comes nearest to that of an absent accelerator.

gpu  NVIDIA's, from the wheels of the extra `mtx[aot]`: neither driver nor CUDA runtime is needed;
     cuDNN's attention as well, if its library and JAX's plugin are installed
tpu  libtpu, if it is installed
cpu  everywhere, as a stand-in for both: FLOPs and arguments are exact, temporaries within about a
     factor of 2, and nothing is known of overlap
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtx.compile.target import GPU_TARGETS, TPU_TARGETS, gpu_topology, tpu_topology
from mtx.errors import UserError
from mtx.plan.attention import Kernel
from mtx.plan.compiled import Backend
from mtx.plan.hardware import hardware

# LLVM's costliest passes come after everything that is read here, and take a sixth of the time.
_FEWER_PASSES = "--xla_llvm_disable_expensive_passes=true"
AttentionKernel = Literal["blocked", "cudnn"]
_KERNELS: dict[Kernel, str] = {
    "cudnn": "cuDNN's attention",
    "blocked": "attention in blocks",
    "sliced": "attention in slices",
}
MOST_CPU_DEVICES = 2048  # above that XLA:CPU starts and lowers but does not compile


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A compiler, and what is said about it."""

    backend: Backend
    label: str
    hint: str = ""
    attention: AttentionKernel = "blocked"
    topology: str = ""  # of the absent devices
    flags: tuple[str, ...] = ()  # XLA_FLAGS


def find_compiler(target: str, devices: int, *, kernel: Kernel = "blocked") -> Compiler:
    """The compiler on this machine that comes nearest to the target's. UserError if there is none
    for that many devices.

    kernel: the attention of a run on the target.
    """
    node_devices = hardware(target).node_devices  # UserError for a name that is not known
    if target in TPU_TARGETS:
        if not importlib.util.find_spec("libtpu"):
            raise UserError(
                f"{target} is compiled for by libtpu, which is not installed: "
                f"pip install 'jax[tpu]=={_version('jax')}'"
            )
        topology = tpu_topology(target, devices)
        return Compiler(
            backend="tpu", label=f"XLA for TPU, {topology}, {_KERNELS[kernel]}", topology=topology
        )
    if target in GPU_TARGETS:
        found = _find_cuda()
        if found:
            cuda, toolkit = found
            missing = _missing_for_cudnn(cuda) if kernel == "cudnn" else []
            compiled = "blocked" if missing else kernel
            hint = f"pip install {' '.join(missing)} compiles cuDNN's attention, which a run uses"
            return Compiler(
                backend="gpu",
                label=f"XLA for {GPU_TARGETS[target].description}, {_KERNELS[compiled]}",
                hint=hint if missing else "",
                attention="cudnn" if compiled == "cudnn" else "blocked",
                topology=gpu_topology(devices, node_devices),
                flags=(f"--xla_gpu_cuda_data_dir={toolkit}", _FEWER_PASSES),
            )
    return _stand_in(target, devices)


def _stand_in(target: str, devices: int) -> Compiler:
    hint = ""
    if target in GPU_TARGETS:
        linux = sys.platform == "linux"
        hint = "pip install 'mtx[aot]'" if linux else "pip install 'mtx[aot]' on Linux"
        hint += f" compiles for {target} itself"
    if devices > MOST_CPU_DEVICES:
        raise UserError(
            f"{devices:,} devices are more than the {MOST_CPU_DEVICES:,} that the CPU's compiler "
            f"can stand in for: {hint or 'use a smaller layout'}"
        )
    return Compiler(
        backend="cpu",
        label="XLA for CPU in float32 as a stand-in, temporaries halved: within a factor of 2",
        hint=hint,
        flags=(
            f"--xla_force_host_platform_device_count={devices}",
            "--xla_backend_optimization_level=0",
        ),
    )


def _find_cuda() -> tuple[str, str] | None:
    """("cuda13" or "cuda12", the folder with ptxas and libdevice), if XLA's GPU compiler and those
    are installed; otherwise None.

    UserError if the compiler's version is not that of JAX.
    """
    for cuda, package in (("cuda13", "nvidia.cu13"), ("cuda12", "nvidia.cuda_nvcc")):
        plugin = f"jax-{cuda}-pjrt"
        if not (_has(f"jax_plugins.xla_{cuda}") and _has(package)):
            continue
        spec = importlib.util.find_spec(package)
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            if not ((place / "bin/ptxas").exists() and (place / "nvvm/libdevice").exists()):
                continue
            if _version(plugin) != _version("jaxlib"):
                raise UserError(
                    f"{plugin} {_version(plugin)} does not go with jaxlib {_version('jaxlib')}: "
                    f"pip install {plugin}=={_version('jaxlib')}"
                )
            return cuda, str(place)
    return None


def _missing_for_cudnn(cuda: str) -> list[str]:
    """What to install to compile cuDNN's attention: its library, 0.5 GB, and the part of JAX's
    plugin that asks for the library's version."""
    plugin, library = f"jax-{cuda}-plugin", f"nvidia-cudnn-cu{cuda.removeprefix('cuda')}"
    there = _has(f"jax_{cuda}_plugin") and _version(plugin) == _version("jaxlib")
    missing = [] if there else [f"{plugin}=={_version('jaxlib')}"]
    return missing if _has("nvidia.cudnn") else [*missing, library]


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False


def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)
