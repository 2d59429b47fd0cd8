"""The table of accelerators, finding a device in it, and a user's own accelerators in TOML."""

import pytest
from errors import names

from mtx.errors import UserError
from mtx.plan.hardware import HARDWARE, find_hardware, hardware, load_hardware


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v5", "tpu-v5p"),
        ("TPU v5 lite", "tpu-v5e"),
        ("tpu v6 LITE", "tpu-v6e"),
    ],
)
def test_devices_are_found_by_what_jax_calls_them(device_kind, name):
    assert find_hardware(device_kind) is hardware(name)


@pytest.mark.parametrize("device_kind", ["cpu", "", "NVIDIA H100 PCIe", "NVIDIA A100 80GB PCIe"])
def test_other_devices_are_not_guessed(device_kind):
    assert find_hardware(device_kind) is None


def test_an_unknown_name_is_an_error_with_the_nearest():
    for read in (hardware, load_hardware):
        with pytest.raises(UserError) as error:
            read("a100-80")
        names(error, "'a100-80'", "'a100-80gb'")


def test_the_papers_machine():
    a100 = hardware("a100-80gb")
    assert a100.peak_tflops["float16"] == 312
    assert (a100.memory_gib, a100.node_devices) == (80, 8)
    assert a100.network_gb_s * 8 == 200  # HDR InfiniBand, Gb/s


@pytest.mark.parametrize("row", HARDWARE.values(), ids=lambda row: row.name)
def test_rows_are_consistent(row):
    assert HARDWARE[row.name] is row
    assert load_hardware(row.name) is row
    assert row.peak_tflops["bfloat16"] > 2 * row.peak_tflops.get("float32", 0)
    assert row.peak_flops("bfloat16") == row.peak_tflops["bfloat16"] * 1e12
    assert row.memory_bytes == row.memory_gib * 2**30
    assert row.memory_gb_s > row.link_gb_s > row.network_gb_s > 0
    assert row.backend == ("cuda" if "NVIDIA" in row.device_kinds[0] else "xla")
    assert row.cores >= 1 and min(row.tile) >= 128
    assert row.source
    hash(row)  # it is the key of caches


def test_a_device_kind_names_one_row():
    kinds = [kind for row in HARDWARE.values() for kind in row.device_kinds]
    assert len(set(kinds)) == len(kinds)


def test_a_type_without_a_unit_is_an_error_that_names_those_with_one():
    with pytest.raises(UserError) as error:
        hardware("tpu-v5e").peak_flops("float16")
    names(error, "tpu-v5e", "float16", "bfloat16")


# --- TOML -----------------------------------------------------------------------------------------

WHOLE = """
memory_gib = 96
memory_gb_s = 4000
node_devices = 4
link_gb_s = 450
network_gb_s = 12.5
[peak_tflops]
bfloat16 = 800
"""


@pytest.fixture
def toml(tmp_path):
    def write(text, name="ours.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_whole_machine(toml):
    machine = load_hardware(toml(WHOLE))
    assert machine.name == "ours"
    assert (machine.memory_gib, machine.node_devices, machine.network_gb_s) == (96, 4, 12.5)
    assert dict(machine.peak_tflops) == {"bfloat16": 800}
    assert machine.device_kinds == () and machine.backend == "xla"
    assert machine.source == "ours.toml"
    assert hash(machine) == hash(load_hardware(toml(WHOLE)))
    assert machine == load_hardware(toml(WHOLE))


def test_all_fields_by_hand(toml):
    head = 'name = "lab"\nsource = "us"\ndevice_kinds = ["NVIDIA X"]\ncores = 99\ntile = [64, 32]\n'
    machine = load_hardware(toml(head + WHOLE))
    assert (machine.name, machine.source, machine.backend) == ("lab", "us", "cuda")
    assert (machine.cores, machine.tile) == (99, (64, 32))


def test_like_another_with_a_slower_network(toml):
    machine = load_hardware(toml('like = "h100"\nnetwork_gb_s = 12.5\n'))
    h100 = hardware("h100")
    assert machine.network_gb_s == 12.5
    assert machine.peak_tflops == h100.peak_tflops and machine.cores == h100.cores
    assert machine.name == "ours" and machine.source == "ours.toml, like h100"
    assert machine.device_kinds == h100.device_kinds and machine.backend == "cuda"
    assert find_hardware(h100.device_kinds[0]) is h100  # the table is unchanged


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memory_gib = ", "TOML"),
        ("", "peak_tflops like a100-40gb"),
        (WHOLE.replace("memory_gib = 96", ""), "memory_gib like a100-40gb"),
        (WHOLE.replace("bfloat16 = 800", ""), "peak_tflops={} [peak_tflops]"),
        ('like = "h10"', "'h10' 'h100'"),
        ("like = 100", "like=100 text"),
        ('like = "h100"\nmemory = 1', "'memory' 'memory_gb_s' 'memory_gib'"),
        ('like = "h100"\nmemory_gib = -80', "memory_gib=-80"),
        ('like = "h100"\nmemory_gib = "80"', "memory_gib='80' number"),
        ('like = "h100"\nlink_gb_s = nan', "link_gb_s=nan"),
        ('like = "h100"\nlink_gb_s = inf', "link_gb_s=inf"),
        ('like = "h100"\nlink_gb_s = 1e13', "link_gb_s=10000000000000.0 1,000,000,000,000"),
        ('like = "h100"\nnode_devices = 0', "node_devices=0 1"),
        ('like = "h100"\nnode_devices = 8.5', "node_devices=8.5 whole"),
        ('like = "h100"\ncores = true', "cores=True whole"),
        ('like = "h100"\nname = ""', "name='' text"),
        ('like = "h100"\ntile = [256]', "tile=[256] 2"),
        ('like = "h100"\ntile = [256, 0]', "tile=0 1"),
        ('like = "h100"\ndevice_kinds = 5', "device_kinds=5 text"),
        ('like = "h100"\npeak_tflops = 5', "peak_tflops=5 [peak_tflops]"),
        ('like = "h100"\n[peak_tflops]\nbf16 = 5', "'bf16' bfloat16"),
        ('like = "h100"\n[peak_tflops]\nfloat8 = 0', "peak_tflops.float8=0"),
    ],
)
def test_mistakes_are_one_line_with_the_file_the_field_and_the_remedy(toml, text, named):
    path = toml(text)
    with pytest.raises(UserError) as error:
        load_hardware(path)
    names(error, *named.split())
    assert str(error.value).startswith(path)


def test_one_text_is_a_list_of_one(toml):
    machine = load_hardware(toml('like = "h100"\ndevice_kinds = "NVIDIA X"'))
    assert machine.device_kinds == ("NVIDIA X",)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("none.toml", "none", "bytes.toml"):
        path = tmp_path / name
        with pytest.raises(UserError) as error:
            load_hardware(str(path))
        names(error, path, "UTF-8" if name == "bytes.toml" else "No such file")
