"""Compiling for absent clusters: which compiler runs, what is read from it, how failures show."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys

import pytest
from errors import names

from mtx.compile import compiler as plan_compiler
from mtx.compile import step as plan_compile
from mtx.compile.compiler import find_compiler
from mtx.compile.hlo import read_program
from mtx.compile.hlo_text import Instruction
from mtx.compile.step import compile_plan
from mtx.compile.target import GPU_TARGETS, gpu_topology, tpu_topology
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.errors import UserError
from mtx.plan.compiled import Compiled
from mtx.plan.held import parameters_per_device
from mtx.plan.memory import predict_memory
from mtx.plan.plan import make_plan
from mtx.presets import preset
from mtx.schedules.makers import make
from mtx.step import xla
from mtx.step.trainer import Trainer

MODEL = ModelConfig(
    layers=8, hidden=64, heads=4, sequence=64, vocab=500, vocab_multiple=8, compute_dtype="float32"
)
RUN = RunConfig(
    model=MODEL, layout=Layout(data=2, pipe=2, tensor=2, microbatch=2, virtual=2), global_batch=16
)


@functools.cache
def stand_in() -> Compiled:
    """Compiled for CPUs, since there is no compiler for this target; takes a few seconds."""
    return compile_plan(RUN, target="mi300x")


def traffic(compiled: Compiled, kind: str, *axes: str):
    """(executions, bytes sent) of this kind over these axes in one step."""
    rows = [row for row in compiled.collectives if (row.kind, row.axes) == (kind, axes)]
    return sum(row.count for row in rows), sum(row.bytes for row in rows)


def test_a_stand_in_says_so_and_counts_exactly():
    compiled = stand_in()
    assert (compiled.backend, compiled.devices) == ("cpu", 8)
    assert "stand-in" in compiled.label and "within a factor of 2" in compiled.label
    assert compiled.hint == ""  # no wheel compiles for it
    assert compiled.matmul_flops == pytest.approx(compiled.formula_flops, rel=1e-12)
    assert compiled.compile_s > 0 and compiled.compiler_peak_bytes > 2**20


def test_arguments_are_masters_moments_and_the_batch():
    compiled, held = stand_in(), parameters_per_device(MODEL, RUN.layout)
    batch = 3 * 4 * RUN.global_batch * MODEL.sequence // RUN.layout.data
    exactly = 12 * held // RUN.layout.data + batch
    assert compiled.arguments_bytes == pytest.approx(exactly, rel=0.01)
    # Masters and moments are updated in place.
    assert compiled.alias_bytes == pytest.approx(12 * held / RUN.layout.data, rel=0.01)
    memory = predict_memory(MODEL, RUN.layout, RUN.global_batch, backend="xla")
    assert 0.5 < memory.total_bytes / compiled.total_bytes < 2


def test_collectives_of_a_step_are_those_of_the_formulas():
    """The comments of `mtx.sharding` as arithmetic; t = d = p = 2, so (n-1)/n is a half."""
    compiled, layout = stand_in(), RUN.layout
    schedule = make("1f1b", microbatches=RUN.microbatches, stages=2, virtual=2)
    x_bytes = 4 * layout.microbatch * MODEL.sequence * MODEL.hidden // layout.tensor
    whole = x_bytes * layout.tensor

    # Stages: x and dx in every tick, 1/t of the sequence.
    assert traffic(compiled, "collective-permute", "pipe") == (
        2 * schedule.ticks, 2 * schedule.ticks * x_bytes,
    )  # fmt: skip
    # Layers: gathers before attention and MLP, in F and in B, and in B those of dy before each
    # row-parallel layer; as many reduce-scatters in F, and dx's in B.
    layers = RUN.microbatches * MODEL.layers // layout.pipe
    m = RUN.microbatches
    gathers, gathered = traffic(compiled, "all-gather", "tensor")
    assert gathers == 6 * layers + 2 * m  # the head's x, and the embedding's dx
    assert gathered == gathers * whole / 2
    scatters, scattered = traffic(compiled, "reduce-scatter", "tensor")
    assert scatters == 4 * layers + 2 * m  # the embedding's x, and the head's dx
    assert scattered == scatters * whole / 2
    # Replicas: parameters gathered once, gradients reduce-scattered once, both float32 here.
    held = 4 * parameters_per_device(MODEL, layout)
    assert traffic(compiled, "all-gather", "data")[1] == pytest.approx(held / 2, rel=0.01)
    assert traffic(compiled, "reduce-scatter", "data")[1] == pytest.approx(held / 2, rel=0.01)
    # The norm of the gradient: one number over all devices.
    assert traffic(compiled, "all-reduce", "pipe", "data", "tensor") == (1, 2 * 4 * 7 / 8)
    assert compiled.timeline is None, "unknown to XLA:CPU"


def test_the_largest_buffers_are_named():
    largest = stand_in().largest
    assert len(largest) == 10
    assert [b.bytes for b in largest] == sorted((b.bytes for b in largest), reverse=True)
    assert any(buffer.what.startswith("stash of") for buffer in largest)


def conditional(scope: str, *, predicate: bool = False, branches: int = 2) -> Instruction:
    names = ", ".join(f"%branch.{n}" for n in range(branches))
    attributes = f"branch_computations={{{names}}}"
    if predicate:
        attributes = "true_computation=%yes, false_computation=%no"
    return Instruction(
        name="conditional.1", opcode="conditional", shapes=(), operands=(), attributes=attributes,
        op_name=f"jit(step)/shard_map/pipeline/while/body/closed_call/{scope}/cond",
    )  # fmt: skip


def test_the_table_says_how_often_a_branch_is_taken():
    """Two stages, four microbatches: both stages of 1F1B run F in 4 of 6 ticks; the phase with F
    has 5 ticks, and so has the phase with B."""
    layout = Layout(pipe=2, tensor=2, idle="skip")
    run = dataclasses.replace(RUN, layout=layout, global_batch=4)
    share = plan_compile.busy_shares(Trainer(run))
    ticks = make("1f1b", microbatches=4, stages=2).ticks
    assert share(conditional("F")) == pytest.approx((1 - 4 / ticks, 4 / ticks))
    assert share(conditional("F", predicate=True)) == pytest.approx((4 / ticks, 1 - 4 / ticks))
    assert share(conditional("B"))[1] == share(conditional("F/embed"))[1] == 4 / ticks
    assert share(conditional("head"))[1] == share(conditional("embed_backward"))[1] == 4 / ticks
    phased = dataclasses.replace(run, layout=dataclasses.replace(layout, idle="phases"))
    share = plan_compile.busy_shares(Trainer(phased))
    assert share(conditional("F/embed"))[1] == share(conditional("head"))[1] == 4 / (ticks - 1)


def test_branches_of_split_sharded_and_sliced_steps():
    layout = Layout(pipe=2, data=2, zero=3, virtual=2, schedule="breadth_first")
    run = dataclasses.replace(RUN, layout=layout, global_batch=8)
    share, trainer = plan_compile.busy_shares(Trainer(run)), Trainer(run)
    ticks = trainer.schedule.ticks
    # Breadth first: a chunk is gathered once for F and once for B, its gradients scattered once.
    for scope in ("all_gather", "B/all_gather", "B/reduce_scatter"):
        assert share(conditional(scope))[1] == pytest.approx(2 / ticks)
    split = dataclasses.replace(RUN, layout=Layout(pipe=2, schedule="zb_h1"), global_batch=4)
    trainer = Trainer(split)
    share = plan_compile.busy_shares(trainer)
    assert share(conditional("W"))[1] == 4 / trainer.schedule.ticks
    layers = RUN.model.layers
    uneven = Layout(pipe=2, virtual=2, stage_layers=(layers - 1, 0, 1, 0), offload=0.5)
    share = plan_compile.busy_shares(Trainer(dataclasses.replace(split, layout=uneven)))
    assert share(conditional("B/chunk/cond/branch_0_fun/empty"))[1] == 2 / 4
    sliced = Layout(pipe=2, schedule="seq1f1b", slices=4)
    share = plan_compile.busy_shares(Trainer(dataclasses.replace(RUN, layout=sliced)))
    inside = "F/while/body/attention"
    assert share(conditional(inside, branches=4)) == (1 / 4,) * 4
    with pytest.raises(UserError) as error:
        share(conditional(inside, branches=3))
    names(error, "attention/cond")


def test_results_go_through_json():
    compiled = stand_in()
    written = json.loads(json.dumps(compiled.to_dict()))
    assert written["total_bytes"] == compiled.total_bytes
    assert Compiled.from_dict(written) == compiled


def test_half_precision_of_a_stand_in_is_halved_but_for_the_gradients():
    half = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    held = parameters_per_device(MODEL, RUN.layout)
    assert plan_compile._halve_temp(4 * held + 1000, half) == 4 * held + 500
    one = dataclasses.replace(half, layout=dataclasses.replace(RUN.layout, data=1))
    held = parameters_per_device(MODEL, one.layout)
    assert plan_compile._halve_temp(4 * held + 1000, one) == (4 + 2) * held + 500
    assert plan_compile._halve_temp(12345, RUN) == 12345


# -- which compiler --------------------------------------------------------------------------------


def test_without_the_extra_a_gpu_is_stood_in_for_with_a_hint(monkeypatch):
    monkeypatch.setattr(plan_compiler, "_find_cuda", lambda: None)
    compiler = find_compiler("a100-80gb", 64)
    assert compiler.backend == "cpu"
    assert "mtx[aot]" in compiler.hint and "a100-80gb" in compiler.hint
    assert "--xla_force_host_platform_device_count=64" in compiler.flags
    with pytest.raises(UserError) as error:
        find_compiler("a100-80gb", 3072)
    names(error, "3,072", "2,048", "mtx[aot]")


def test_with_the_extra_a_gpu_is_compiled_for(monkeypatch):
    monkeypatch.setattr(plan_compiler, "_find_cuda", lambda: ("cuda13", "/cuda"))
    compiler = find_compiler("a100-80gb", 3072)
    assert (compiler.backend, compiler.topology) == ("gpu", "1x384x8")
    assert "--xla_gpu_cuda_data_dir=/cuda" in compiler.flags
    assert compiler.hint == "" and "A100" in compiler.label
    assert find_compiler("mi300x", 8).backend == "cpu"  # XLA's compiler for it is not a wheel


def test_cudnn_attention_is_compiled_where_its_library_is_there(monkeypatch):
    monkeypatch.setattr(plan_compiler, "_find_cuda", lambda: ("cuda13", "/cuda"))
    monkeypatch.setattr(plan_compiler, "_version", lambda name: "0.12.0.1")
    there = {"jax_cuda13_plugin", "nvidia.cudnn"}
    monkeypatch.setattr(plan_compiler, "_has", lambda module: module in there)
    compiler = find_compiler("h100", 8, kernel="cudnn")
    assert (compiler.attention, compiler.hint) == ("cudnn", "")
    assert "cuDNN's attention" in compiler.label
    for kernel, said in (("blocked", "in blocks"), ("sliced", "slices")):
        compiler = find_compiler("h100", 8, kernel=kernel)  # of a model that cuDNN cannot run
        assert (compiler.attention, compiler.hint) == ("blocked", "") and said in compiler.label
    there.clear()
    compiler = find_compiler("h100", 8, kernel="cudnn")
    assert compiler.attention == "blocked" and "attention in blocks" in compiler.label
    assert "pip install jax-cuda13-plugin==0.12.0.1 nvidia-cudnn-cu13 " in compiler.hint


@pytest.mark.parametrize(
    ("target", "model", "layout", "kernel"),
    [
        ("h100", {}, {}, "cudnn"),
        ("h100", {}, {"attention": "blocked"}, "blocked"),
        ("h100", {"compute_dtype": "float32"}, {}, "blocked"),
        ("h100", {"hidden": 60}, {}, "blocked"),  # heads of 15
        ("h100", {"attention_dropout": 0.1}, {}, "blocked"),
        ("h100", {}, {"schedule": "seq1f1b", "slices": 4, "virtual": 1}, "sliced"),
        ("mi300x", {}, {}, "blocked"),
    ],
)
def test_the_attention_that_is_compiled_is_that_of_a_run(
    monkeypatch, target, model, layout, kernel
):
    asked = []

    def find(target, devices, *, kernel):
        asked.append(kernel)
        raise UserError("found")

    monkeypatch.setattr(plan_compile, "find_compiler", find)
    run = dataclasses.replace(
        RUN, layout=dataclasses.replace(RUN.layout, **layout),
        model=dataclasses.replace(MODEL, **{"compute_dtype": "bfloat16"} | model),
    )  # fmt: skip
    with pytest.raises(UserError):
        compile_plan(run, target=target)
    assert asked == [kernel]


def test_a_compiler_of_another_version_is_an_error(monkeypatch, tmp_path):
    for folder in ("jax_plugins/xla_cuda13", "nvidia/cu13/bin", "nvidia/cu13/nvvm/libdevice"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "nvidia/cu13/bin/ptxas").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for module in ("nvidia", "jax_plugins"):  # so that other tests do not find these
        monkeypatch.setitem(sys.modules, module, None)
    for module in [name for name in sys.modules if name.split(".")[0] in ("nvidia", "jax_plugins")]:
        monkeypatch.delitem(sys.modules, module)
    versions = {"jax-cuda13-pjrt": "0.9.0", "jaxlib": "0.12.0"}
    monkeypatch.setattr(plan_compiler, "_version", versions.__getitem__)
    with pytest.raises(UserError) as error:
        find_compiler("h100", 8)
    names(error, "jax-cuda13-pjrt==0.12.0")
    versions["jax-cuda13-pjrt"] = "0.12.0"
    assert f"--xla_gpu_cuda_data_dir={tmp_path}/nvidia/cu13" in find_compiler("h100", 8).flags


def test_unknown_targets_and_a_missing_libtpu_are_errors(monkeypatch):
    with pytest.raises(UserError) as error:
        find_compiler("a100-80", 8)
    names(error, "a100-80", "a100-80gb")
    monkeypatch.setattr(plan_compiler, "_has", lambda module: False)
    with pytest.raises(UserError) as error:
        find_compiler("tpu-v5p", 8)
    names(error, "libtpu", "jax[tpu]==")


@pytest.mark.parametrize(
    ("target", "devices", "topology"),
    [
        ("tpu-v5p", 4, "v5p:2x2x1"),
        ("tpu-v5p", 16, "v5p:2x2x4"),
        ("tpu-v5p", 64, "v5p:4x4x4"),
        ("tpu-v5p", 3072, "v5p:12x16x16"),
        ("tpu-v5e", 8, "v5e:2x4"),
        ("tpu-v6e", 256, "v6e:16x16"),
    ],
)
def test_slices_of_tpus(target, devices, topology):
    assert tpu_topology(target, devices) == topology


def test_slices_that_are_not_sold_are_errors():
    with pytest.raises(UserError) as error:
        tpu_topology("tpu-v5p", 100)
    names(error, 100, 64, 128)
    with pytest.raises(UserError) as error:
        tpu_topology("tpu-v5e", 512)
    names(error, 512, 256)


def test_clusters_of_gpus_and_what_is_said_of_each():
    assert gpu_topology(3072, 8) == "1x384x8"
    assert gpu_topology(4, 8) == "1x1x4"
    assert gpu_topology(144, 72) == "1x2x72"
    assert gpu_topology(12, 8) == "1x3x4"
    for target in GPU_TARGETS.values():
        text = target.text()
        needed = ("core_count", "clock_rate_ghz", "device_memory_size", target.description)
        for name in (*needed, "runtime_version {", "dnn_version_info {"):
            assert name in text


# -- what goes wrong -------------------------------------------------------------------------------

TRACEBACK = """\
I0000 00:00:1795270507.181298 9752 cudart_stub.cc:31] Could not find cuda drivers on your machine
Traceback (most recent call last):
  File "compile.py", line 24, in <module>
    main()
{error}
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception.
"""


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (1, TRACEBACK.format(error="mtx.errors.UserError: layers=7 is odd"), "layers=7 is odd"),
        (1, TRACEBACK.format(error="jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 60G of 16G"),
         "JaxRuntimeError: RESOURCE_EXHAUSTED: 60G of 16G"),
        (-9, "", "the compiler was ended by SIGKILL, most likely for want of memory"),
        (-6, "x\nF1121 14:00 hlo.cc:1] Check failed: n > 0\n#1 0x00",
         "the compiler was ended by SIGABRT: F1121 14:00 hlo.cc:1] Check failed: n > 0"),
        (3, "", "the compiler ended with status 3"),
    ],
)  # fmt: skip
def test_a_failure_is_one_line(code, stderr, reason):
    assert plan_compile._reason(code, stderr) == reason


def fake_compiler(monkeypatch, *answers):
    """Let processes that `compile_plan` starts return these (code, stderr); returns their flags."""
    flags, answers = [], iter(answers)

    def run(command, *, input, env, **_):
        flags.append(env["XLA_FLAGS"])
        code, stderr = next(answers)
        request = json.loads(input)["compiler"]
        compiled = dataclasses.replace(stand_in(), label=request["label"])
        stdout = "" if code else f"noise\n{json.dumps(compiled.to_dict())}\n"
        return plan_compile.subprocess.CompletedProcess(command, code, stdout, stderr)

    monkeypatch.setattr(plan_compiler, "_find_cuda", lambda: ("cuda13", "/cuda"))
    monkeypatch.setattr(plan_compile.subprocess, "run", run)
    return flags


NO_TILES = TRACEBACK.format(error="jax.errors.JaxRuntimeError: Couldn't find output tile sizes")


def test_where_triton_fails_cublas_is_taken_and_said(monkeypatch):
    stand_in()
    flags = fake_compiler(monkeypatch, (1, NO_TILES), (0, ""))
    compiled = compile_plan(RUN, target="a100-80gb")
    assert "triton" not in flags[0] and "--xla_gpu_enable_triton_gemm=false" in flags[1]
    assert "cuBLAS" in compiled.label


def test_where_the_compiler_fails_its_reason_is_given(monkeypatch):
    stand_in()
    fake_compiler(monkeypatch, (1, NO_TILES), (1, NO_TILES))
    with pytest.raises(UserError) as error:
        compile_plan(RUN, target="a100-80gb")
    names(error, "a100-80gb", "Couldn't find")


# -- with the extra --------------------------------------------------------------------------------

needs_gpu_compiler = pytest.mark.skipif(
    plan_compiler._find_cuda() is None, reason="pip install 'mtx[aot]' compiles for GPUs"
)


def compiled_for_gpus(script: str, *flags: str) -> str:
    """The output of a script that compiles for GPUs in its own process."""
    _, toolkit = plan_compiler._find_cuda()
    flags = " ".join([f"--xla_gpu_cuda_data_dir={toolkit}", *flags])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(("weave", "compiled"), [("auto", "off"), ("off", "off"), ("on", "on")])
def test_what_a_plan_leaves_open_is_compiled_as_it_is_priced(weave, compiled, monkeypatch):
    """For a GPT on A100s, whose seconds are Megatron-LM's."""
    seen = []
    monkeypatch.setattr("mtx.compile.step._in_own_process", lambda run, *_: seen.append(run))
    run = preset("gpt-39b")
    run = dataclasses.replace(run, layout=dataclasses.replace(run.layout, weave=weave))
    plan = make_plan(run, target="a100-80gb")
    assert plan.run.layout.weave == weave
    compile_plan(plan.run, target="a100-80gb")
    assert [one.layout.weave for one in seen] == [compiled]


@needs_gpu_compiler
def test_a_gpu_that_is_not_there():
    model = ModelConfig(layers=8, hidden=1024, heads=16, sequence=1024, vocab=8000)
    layout = Layout(
        data=4, pipe=2, tensor=2, microbatch=2, recompute="full", idle="phases", weave="off"
    )
    run = RunConfig(model=model, layout=layout, global_batch=64)
    compiled = compile_plan(run, target="a100-80gb")
    assert (compiled.backend, compiled.devices) == ("gpu", 16)
    assert compiled.matmul_flops == pytest.approx(compiled.formula_flops, rel=1e-12)
    fused = "cuDNN" in compiled.label
    assert fused == (compiled.hint == "")
    backend = "cuda" if fused else "xla"
    memory = predict_memory(model, layout, run.global_batch, backend=backend)
    assert memory.total_bytes == pytest.approx(compiled.total_bytes, rel=0.1)
    schedule = make("1f1b", microbatches=run.microbatches, stages=2)
    x_bytes = 2 * layout.microbatch * model.sequence * model.hidden // 2
    # Between two stages x and dx go in the same direction: XLA would send them together.
    sends = sum((p.forward + p.backward) * (p.stop - p.start) for p in schedule.phases)
    assert traffic(compiled, "collective-permute", "pipe") == (sends, sends * x_bytes)
    assert compiled.timeline
    estimate = {row.axes: row for row in compiled.timeline.exposures}
    assert {("tensor",), ("data",), ("pipe",)} <= estimate.keys()
    assert all(0 <= row.exposed_s <= row.seconds * (1 + 1e-9) for row in estimate.values())
    # Some collectives over tensor lie beside matmuls, and so do some of the sends.
    for axes in (("tensor",), ("pipe",)) if xla.version() >= xla.IN_PLACE else ():
        assert 0 < estimate[axes].exposed_s < 0.96 * estimate[axes].seconds
        # B has weight gradients beside its scatters, and matmuls beside the gathers it repeats.
        assert estimate["tensor",].exposed_s < 0.7 * estimate["tensor",].seconds
    assert compiled.timeline.step_s > sum(row.exposed_s for row in estimate.values())


STEP = """
import jax
from mtx.compile.compiler import find_compiler
from mtx.compile.step import mesh_of
from mtx.config import Layout, ModelConfig, RunConfig
from mtx.step.trainer import Trainer
model = ModelConfig(layers=8, hidden=1024, heads=8, sequence=1024, vocab=8000)
layout = Layout(
    pipe=2, tensor=2, virtual=2, idle="phases", attention="blocked", weave="off"
)
run = RunConfig(model=model, layout=layout, global_batch=8)
mesh = mesh_of(run, "h100", find_compiler("h100", 4, kernel="blocked"))
print(Trainer(run, mesh=mesh).compile_step(mesh).as_text())
"""


@needs_gpu_compiler
@pytest.mark.skipif(xla.version() < xla.IN_PLACE, reason="of jax 0.11 on")
def test_weights_are_read_and_gradients_added_where_they_lie():
    """No kernel copies a layer's weight out of its stack, and only matmuls add to the sum of its
    gradients."""
    text = compiled_for_gpus(STEP)
    for dims in ("2048,1024", "1024,2048", "1024,3,4,128", "4,128,1024"):  # a device's part of each
        copies = rf"= bf16\[1,1,{dims}\]\S* (copy\(|fusion\([^\n]*kind=kLoop)"
        assert not re.search(copies, text), dims
        adds = re.findall(rf"= \(?f32\[2,2,{dims}\][^\n]*? fusion\([^\n]*", text)
        # Some fusions do not say where they come from, but the fused ops do.
        inside = [text.split(f"\n%{re.search(r'calls=%([^, ]+)', add)[1]} (")[1] for add in adds]
        within = ["/pipeline/while/" in add + body.split("\n}")[0]
                  for add, body in zip(adds, inside)]  # fmt: skip
        kinds = [re.search(r"kind=(\w+)", add)[1] for add, is_in in zip(adds, within) if is_in]
        assert len(kinds) >= 2 and set(kinds) == {"kCustom"}, (dims, kinds)


FLOAT8 = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mtx.compile.target import GPU_TARGETS
topology = topologies.get_topology_desc(
    platform="cuda", target_config=GPU_TARGETS["h100"].text(), topology="1x1x1"
)
sharding = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
a = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn, sharding=sharding)
product = lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.bfloat16)
print(jax.jit(product).lower(a, a).compile().as_text())
"""


@needs_gpu_compiler
def test_float8_matmuls_are_cublas_own():
    program = read_program(compiled_for_gpus(FLOAT8, "--xla_gpu_enable_triton_gemm=false"))
    assert program.custom_calls() == {"__cublas$lt$matmul$f8": 1}
    assert program.matmul_flops() == 2 * 256**3


@needs_gpu_compiler
@pytest.mark.skipif(xla.version() < xla.IN_PLACE, reason="of jax 0.11 on")
def test_float8_is_three_products_of_each_linear_layer():
    """Four linear layers per block, and no other products: none of attention, embedding or head,
    and none that is computed in 16 bits instead."""
    script = STEP.replace("vocab=8000", "vocab=8000, fp8='hybrid'")
    script = script.replace("virtual=2", "virtual=1").replace('idle="phases"', 'idle="skip"')
    text = compiled_for_gpus(script)  # one loop of ticks, with one of layers in F and one in B
    calls = re.findall(
        r" custom-call\((.*?)\), .*__cublas\$lt\$matmul\$f8.*op_name=\"([^\"]*)", text
    )
    assert len(calls) == 12 == read_program(text).custom_calls()["__cublas$lt$matmul$f8"]
    for operands, name in calls:  # two matrices and their scales; the product's name is in it
        assert "scaled_dot" in name
        assert not all("constant" in each for each in operands.split(", ")[2:])
    assert sum("/F/" in name for _, name in calls) == 4
    assert not re.search(r" = \S+ (dot|scaled-dot)\([^\n]*scaled_dot", text)
    for dims in ("2048,1024", "1024,2048", "1024,3,4,128", "4,128,1024"):  # added in place
        sums = re.findall(rf"= (\S+)\[1,4,{dims}\]\S* fusion\([^\n]*pipeline/while/", text)
        assert sums == ["f32"], dims


@needs_gpu_compiler
def test_float8_is_counted():
    model = ModelConfig(layers=4, hidden=1024, heads=8, sequence=1024, vocab=8000, fp8="e4m3")
    run = RunConfig(model=model, layout=Layout(data=2, tensor=2, zero=3), global_batch=8)
    compiled = compile_plan(run, target="h100")
    assert compiled.matmul_flops == pytest.approx(compiled.formula_flops, rel=1e-12)
    backend = "cuda" if "cuDNN" in compiled.label else "xla"
    memory = predict_memory(model, run.layout, 8, backend=backend)
    assert memory.total_bytes == pytest.approx(compiled.total_bytes, rel=0.15)
