"""Accelerators as data: peak rates, memory and links, from their vendors' data sheets.

Peaks are dense (without structured sparsity). Links count one direction. Memory is the vendor's
number, read as GiB; the driver keeps some of it. Nothing here was measured by this project. A
user's own machine is a TOML file: see `load_hardware`.

Host links and memory: NVIDIA's data sheets give PCIe both ways, 64 GB/s for the A100 ("PCIe Gen4"),
128 GB/s for the H100, H200 and B200 ("PCIe Gen5"), and for GB200 900 GB/s of NVLink-C2C for the two
GPUs of a Grace. Systems' memory: DGX A100 data sheet, 2 TB, with 40 GB GPUs 1 TB; DGX H100, H200
and B200, 2 TB; GB200 NVL72, 480 GB per Grace. TPUs: the memory of Google Cloud's machine types
(ct5p-hightpu-4t 448 GB, ct5lp-hightpu-8t 384 GB, ct6e-standard-8t 1,440 GB). The MI300X's is
assumed. Cards that share a switch's link to the host have less each: then say so in a TOML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

from mtx.errors import UserError, shown, unknown_name
from mtx.families import ModelConfig
from mtx.fields import Between, checked
from mtx.files import read_toml
from mtx.plan.attention import Backend

Rate = Annotated[float, Between(1e-6, 1e12)]  # so that no time or memory is lost in rounding
Count = Annotated[int, Between(1, 10**12)]
_DTYPES = ("bfloat16", "float16", "float32", "float8")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, in the node and the network that it is usually sold with."""

    name: str
    device_kinds: tuple[str, ...]  # as `jax.Device.device_kind` reports them
    # By type of the operands; absent if there is no such unit. Not hashed: a mapping cannot be.
    peak_tflops: Mapping[str, float] = field(hash=False)
    memory_gib: Rate
    memory_gb_s: Rate
    node_devices: Count  # joined by the fast link: a node, a rack, or a TPU pod
    link_gb_s: Rate  # one device to the others of its node
    network_gb_s: Rate  # one device's share of the node's network
    source: str
    cores: Count = 1  # that compute a tile of a matrix product each; 1: the whole chip does
    host_gb_s: Rate = 32  # one device to its host's memory, one direction, nominal: PCIe 4 x16
    host_gib: Rate = 256  # of the host's memory, one device's part: 2 TB for eight, as a DGX has
    tile: tuple[Count, Count] = (128, 128)  # rows and columns of the product that a core computes

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products of `dtype`; UserError if the accelerator has no unit for
        them."""
        if dtype not in self.peak_tflops:
            raise UserError(
                f"{self.name} has no unit for {dtype}; use {' or '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[dtype] * 1e12

    def check(self, model: ModelConfig) -> None:
        """UserError if the accelerator has no unit for a type in which the model computes."""
        self.peak_flops(model.compute_dtype)
        if model.fp8 != "off" and "float8" not in self.peak_tflops:
            raise UserError(f"{self.name} has no unit for fp8={model.fp8!r}; use fp8='off'")

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    @property
    def backend(self) -> Backend:
        """Which attention kernels it has; see `mtx.plan.attention`."""
        nvidia = any(kind.startswith("NVIDIA") for kind in self.device_kinds)
        return "cuda" if nvidia else "xla"


_GPU_TILE = (256, 128)  # the largest of cuBLAS, and usually its fastest


def _row(
    name, *device_kinds, b16, fp16=True, fp32=None, fp8=None, memory, node, tile=_GPU_TILE, **rest
) -> Hardware:
    peaks = {"bfloat16": b16, "float16": b16 if fp16 else None, "float32": fp32, "float8": fp8}
    memory_gib, memory_gb_s = memory
    node_devices, link_gb_s, network_gb_s = node
    return Hardware(
        name=name, device_kinds=device_kinds, memory_gib=memory_gib, memory_gb_s=memory_gb_s,
        peak_tflops=MappingProxyType({dtype: peak for dtype, peak in peaks.items() if peak}),
        node_devices=node_devices, link_gb_s=link_gb_s, network_gb_s=network_gb_s, tile=tile,
        **rest,
    )  # fmt: skip


_HOPPER: dict[str, Any] = dict(b16=989.4, fp32=66.9, fp8=1978.9, cores=132, host_gb_s=64)
_HOPPER_NODE = (8, 450, 50)  # NVLink 4; 400 Gb/s NDR InfiniBand per GPU
_AMPERE: dict[str, Any] = dict(b16=312, fp32=19.5, cores=108)
_AMPERE_NODE = (8, 300, 25)  # NVLink 3; 200 Gb/s HDR InfiniBand per GPU, as in SC'21
# A TPU's matrix units are seen as one: all that counts is that sizes are padded to theirs.
_TPU_V5: dict[str, Any] = dict(fp16=False, tile=(128, 128))

_ROWS = (
    _row(
        "a100-40gb", "NVIDIA A100-SXM4-40GB", **_AMPERE, memory=(40, 1555), node=_AMPERE_NODE,
        host_gib=128, source="NVIDIA A100 data sheet, SXM",
    ),
    _row(
        "a100-80gb", "NVIDIA A100-SXM4-80GB", **_AMPERE, memory=(80, 2039), node=_AMPERE_NODE,
        source="NVIDIA A100 data sheet, SXM",
    ),
    _row(
        "h100", "NVIDIA H100 80GB HBM3", **_HOPPER, memory=(80, 3352), node=_HOPPER_NODE,
        source="NVIDIA H100 data sheet, SXM",
    ),
    _row(  # the H100 with fewer links; eight cards per node, as DeepSeek-V3's cluster has
        "h800", "NVIDIA H800", **_HOPPER, memory=(80, 3352), node=(8, 200, 50),
        source="DeepSeek-V3 (arXiv 2412.19437), section 3.1; NVLink of 400 GB/s both ways",
    ),
    _row(
        "h200", "NVIDIA H200", **_HOPPER, memory=(141, 4800), node=_HOPPER_NODE,
        source="NVIDIA H200 data sheet, SXM",
    ),
    _row(
        "b200", "NVIDIA B200", b16=2250, fp32=80, fp8=4500, memory=(180, 8000), node=(8, 900, 50),
        cores=148, host_gb_s=64, source="NVIDIA Blackwell technical brief, HGX B200",
    ),
    _row(
        "gb200", "NVIDIA GB200", b16=2500, fp32=80, fp8=5000, memory=(186, 8000),
        node=(72, 900, 50), cores=152, host_gb_s=225, host_gib=223,
        source="NVIDIA GB200 NVL72 data sheet, per GPU",
    ),
    _row(
        "mi300x", "AMD Instinct MI300X", "AMD Instinct MI300X OAM", b16=1307.4, fp32=163.4,
        fp8=2614.9, memory=(192, 5300), node=(8, 448, 50), cores=304, host_gb_s=64, tile=(256, 256),
        source="AMD Instinct MI300X data sheet; 7 Infinity Fabric links of 64 GB/s",
    ),
    _row(
        "tpu-v5p", "TPU v5p", "TPU v5", b16=459, fp8=459, **_TPU_V5, memory=(95, 2765),
        node=(8960, 600, 6.25), host_gib=104, source="Google Cloud TPU v5p documentation",
    ),
    _row(
        "tpu-v5e", "TPU v5e", "TPU v5 lite", b16=197, **_TPU_V5, memory=(16, 819),
        node=(256, 200, 3.125), host_gib=45, source="Google Cloud TPU v5e documentation",
    ),
    _row(
        "tpu-v6e", "TPU v6e", "TPU v6 lite", b16=918, fp16=False, tile=(256, 256),
        memory=(32, 1638), node=(256, 400, 12.5), host_gib=168,
        source="Google Cloud TPU v6e documentation",
    ),
)  # fmt: skip
DEFAULT = "a100-80gb"  # SC'21's: the target of a plan that names none
HARDWARE: Mapping[str, Hardware] = MappingProxyType({row.name: row for row in _ROWS})


def hardware(name: str) -> Hardware:
    """The row of that name; UserError with the nearest name if there is none."""
    if name not in HARDWARE:
        raise unknown_name("hardware", name, HARDWARE)
    return HARDWARE[name]


def find_hardware(device_kind: str) -> Hardware | None:
    """The row whose devices report this kind (`jax.devices()[0].device_kind`), or None.

    Only exact names count: a PCIe card is not the SXM module of the same name.
    """
    wanted = device_kind.strip().lower()
    for row in HARDWARE.values():
        if wanted in (kind.lower() for kind in row.device_kinds):
            return row
    return None


def load_hardware(name_or_path: str) -> Hardware:
    """A row of the table by its name, or the user's own machine from a TOML file:

        name = "our-cluster"            # its name; the file's if it is left out
        like = "h100"                   # a row of the table, for everything left out
        memory_gib = 80
        memory_gb_s = 3352
        node_devices = 8                # joined by the fast link
        link_gb_s = 450                 # one device to its node, one direction
        network_gb_s = 25               # one device's share of the node's network, one direction
        host_gb_s = 64                  # one device to its host's memory, one direction
        host_gib = 256                  # one device's part of that memory
        source = "our data sheet"
        device_kinds = ["NVIDIA H100"]  # as jax.Device.device_kind reports them; "NVIDIA": CUDA
        cores = 132                     # GPU: its streaming multiprocessors or compute units
        tile = [256, 128]               # GPU: rows and columns of its largest matmul tile

        [peak_tflops]                   # dense, by type of the operands
        bfloat16 = 989.4
        float32 = 66.9

    Without `like`, the fields from `memory_gib` to `network_gb_s` and `peak_tflops` are needed.
    A name that ends in .toml, or has a slash, is a path. UserError, in one line, for an unknown
    name, a file that cannot be read, and a field that is unknown, missing, or out of range.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml" and len(path.parts) < 2:
        return hardware(name_or_path)
    given = read_toml(name_or_path, "hardware")
    try:
        return _from_toml(given, default_name=path.stem)
    except UserError as error:
        raise UserError(f"{name_or_path}: {error}") from None


def _from_toml(given: dict, *, default_name: str) -> Hardware:
    kinds = get_type_hints(Hardware, include_extras=True) | {"like": str}
    for key in given:
        if key not in kinds:
            raise unknown_name("field", key, kinds)
    read: dict[str, Any] = {
        key: _peaks(value) if key == "peak_tflops" else checked(key, value, kinds[key])
        for key, value in given.items()
    }
    source = f"{default_name}.toml"
    values: dict[str, Any] = {"name": default_name, "device_kinds": (), "source": source}
    if "like" in read:
        base = hardware(read.pop("like"))
        values = {each.name: getattr(base, each.name) for each in fields(Hardware)} | {
            "name": default_name, "source": f"{source}, like {base.name}"
        }  # fmt: skip
    values |= read
    for each in fields(Hardware):
        if each.name not in values and each.default is MISSING:
            raise UserError(
                f"{each.name} is missing: give it, or like = one of {', '.join(HARDWARE)}"
            )
        if values.get(each.name) == "":
            raise UserError(f"{each.name}='' must be a text that is not empty")
    return Hardware(**values)


def _peaks(value: object) -> Mapping[str, float]:
    if not isinstance(value, dict) or not value:
        raise UserError(
            f"peak_tflops={shown(value)} must be a table [peak_tflops] with lines as bfloat16 = 312"
        )
    for dtype in value:
        if dtype not in _DTYPES:
            raise unknown_name("type in peak_tflops", dtype, _DTYPES)
    return MappingProxyType(
        {dtype: checked(f"peak_tflops.{dtype}", peak, Rate) for dtype, peak in value.items()}
    )
