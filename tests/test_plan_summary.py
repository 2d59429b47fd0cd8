"""The summary page of a plan."""

import dataclasses
import json

import pytest
from errors import names

from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.compare import part_name
from mtx.plan.compiled import Buffer, Compiled, Exposure, Span, Spent, Tick, Timeline, Traffic
from mtx.plan.flops import forward_flops
from mtx.plan.page import render, rows_table
from mtx.plan.plan import make_plan
from mtx.plan.summary import compiled_rows, plan_rows, title
from mtx.presets import preset


def page(run, *, tokens=None, price=None, **options):
    rows = plan_rows(make_plan(run, **options), tokens=tokens, price=price)
    return {row.name: (row.value, row.source) for row in rows}


def test_the_page_of_the_trillion_parameter_run():
    facts = page(preset("gpt-1t"))
    assert facts["data x pipe x tensor"] == ("6 x 64 x 8 = 3,072 devices", "given")
    assert facts["nodes"] == ("384; tensor groups inside a node", "computed")
    assert facts["microbatches"] == ("m = 512 a replica, of b = 1", "computed")
    assert facts["parameters, exactly"] == ("1,008,038,758,400", "computed")
    assert facts["by the paper's equation (2)"] == ("1,008,038,707,200", "computed")
    assert facts["in the paper's table 1"] == ("1,008.0 billion", "published")
    share = make_plan(preset("gpt-1t")).bubble_over_ideal
    assert facts["bubble"] == (f"{share:.2%} of ideal time", "predicted")
    assert facts["SC'21's (p-1)/(v m)"][0].startswith("12.30%, were stages equal")
    assert facts["ticks of one F and one B"] == ("638", "computed")
    assert facts["waiting between F and B"] == ("127 on stage 0, 1 on the last", "computed")
    assert facts["paper's convention"] == ("5.1391e+19", "computed")
    assert facts["model FLOPs (today's MFU)"] == ("3.8302e+19", "computed")
    assert facts["throughput of a GPU"] == ("163 teraFLOP/s, 52 % of peak", "published")
    assert facts["of all GPUs"] == ("502.0 petaFLOP/s", "published")
    assert facts["a step"] == ("102.4 s", "computed from published")
    assert facts["450 billion tokens"] == ("84 days", "published")
    assert facts["by equation (4), 8TP/(nX)"] == ("83.9 days", "computed from published")
    total, source = facts["in all"]
    assert "of 80 GiB: fits" in total and source == "predicted"


def test_published_rows_only_for_runs_of_the_paper():
    sources = {row.source for row in plan_rows(make_plan(preset("miniature")))}
    assert sources == {"given", "computed", "predicted"}
    run = preset("gpt-1t")
    other = dataclasses.replace(run, global_batch=6)
    assert not {row.source for row in plan_rows(make_plan(other))} & {
        "published",
        "computed from published",
    }


def test_what_does_not_fit_is_said():
    run = preset("gpt-1t")
    small = dataclasses.replace(run.layout, pipe=8)
    facts = page(dataclasses.replace(run, layout=small))
    assert "does not fit" in facts["in all"][0]
    assert "fits" in page(run, target="a100-40gb")["in all"][0]
    assert "does not fit" in page(run, target="tpu-v5e")["in all"][0]


def test_a_tight_fit_names_the_setting():
    """JAX takes three quarters of a GPU unless told to take more."""
    run = preset("gpt-1t")
    tight = dataclasses.replace(run, layout=dataclasses.replace(run.layout, pipe=32, data=12))
    assert page(tight, target="a100-40gb")["in all"][0].endswith(
        "with XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"
    )
    assert "FRACTION" not in page(tight, target="a100-80gb")["in all"][0]


def test_tensor_groups_across_nodes_are_said():
    run = preset("gpt-1t")
    wide = dataclasses.replace(run.layout, tensor=16, pipe=32)
    wide = dataclasses.replace(run, layout=wide)
    assert page(wide)["nodes"][0] == "384; tensor groups across nodes of 8"
    assert "inside a node" in page(wide, target="tpu-v5p")["nodes"][0]


def test_an_unknown_target_is_an_error():
    with pytest.raises(UserError) as error:
        make_plan(preset("miniature"), target="a100")
    names(error, "a100")


def test_the_settings_of_the_prediction_stand_beside_the_papers():
    facts = page(preset("gpt-1t"))
    assert facts["with"][0].startswith("recompute=full, sequence_parallel=False, float16")
    ours, source = facts["predicted above, with"]
    assert ours.startswith("recompute=full, sequence_parallel=True, bfloat16") and source == "given"
    assert facts["of the software"][0].startswith("megatron-2021: ")
    own, label = facts["with this program's kernels"]
    assert own.endswith(" s a step") and label == "predicted"
    assert "with this program's kernels" not in page(preset("gpt-1t"), target="h100")


def test_parts_of_the_step_add_up_on_the_page():
    plan = make_plan(preset("gpt-76b"))
    rows = [row for row in plan_rows(plan) if row.section == "Time of a step"]
    shares = [row.value.rpartition("(")[2].rstrip("%)") for row in rows if "%)" in row.value]
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.5) and len(shares) > 5
    facts = {row.name: row.value for row in rows}
    assert facts["the whole step"] == f"{plan.time.step_s:,.2f} s"


def test_the_page_of_a_llama_says_what_does_not_apply():
    facts = page(preset("llama-3-70b"))
    assert facts["layers of hidden, heads"][0].endswith("64 heads, 8 of keys and values")
    assert facts["inside of the MLP"] == ("28,672, gated", "given")
    assert facts["parameters, exactly"] == ("70,553,706,496", "computed")
    assert facts["by the paper's equation (2)"][0].startswith("does not apply: ")
    assert facts["of the software"][0].startswith("mtx: ")  # SC'21's software had no Llama
    assert not any(name.startswith("with this program's") for name in facts)


def test_the_page_of_a_bert_has_both_heads():
    facts = page(preset("bert-336m"))
    assert facts["by the paper's equation (2)"][0].startswith("does not apply: ")
    assert facts["masked head"][0].startswith("1.08 million") and "binary head" in facts
    assert "inside of the MLP" not in facts  # 4 times the hidden size


@pytest.mark.parametrize(
    ("name", "heading"),
    [("gpt-1t", "GPT, 1.01 trillion"), ("llama-2-7b", "Llama, 6.74 b"), ("bert-336m", "BERT, 336")],
)
def test_the_title_names_the_family(name, heading):
    assert title(make_plan(preset(name))).startswith(heading)


def test_forward_flops_by_part_are_on_the_page():
    run = preset("gpt-1t")
    forward = forward_flops(run.model, run.global_batch, causal=True)
    mlp = forward.layers["mlp"]
    assert page(run)["F of it, MLP"][0] == f"{mlp:.4e} ({mlp / forward.total:.1%})"


def test_days_and_cost_of_a_budget():
    plan = make_plan(preset("gpt-1t"))
    value, source = page(plan.run, tokens=2e12, price=1.5)["2000 billion tokens"]
    hours = plan.gpu_hours(2e12)
    assert value.startswith(f"{plan.days(2e12):,.1f} days, {hours:,.0f} GPU hours")
    assert value.endswith(f"cost {1.5 * hours:,.0f} at 1.5 a GPU hour") and source == "predicted"


def test_where_full_recomputation_is_not_needed_the_page_says_so():
    run, name = preset("gpt-39b"), "with recompute=selective"
    plan = make_plan(run, target="h100")
    lighter = make_plan(
        dataclasses.replace(run, layout=dataclasses.replace(run.layout, recompute="selective")),
        target="h100",
    )  # fmt: skip
    facts = {row.name: row.value for row in plan_rows(plan)}
    assert plan.better_recompute == ("selective", lighter.time, lighter.memory)
    assert facts[name] == (
        f"{lighter.memory.total_bytes / 2**30:.2f} GiB of 80 GiB: fits (37%); a step in "
        f"{lighter.time.step_s:.2f} s, not {plan.time.step_s:.2f} s"
    )
    assert lighter.time.step_s < 0.8 * plan.time.step_s
    # If it is not asked for, or does not fit, it is not mentioned.
    assert name not in {row.name for row in plan_rows(lighter)}
    layout = Layout(data=32, tensor=4, microbatch=32, recompute="full")
    tight = dataclasses.replace(preset("gpt-18b"), layout=layout, global_batch=1024)
    assert name not in {row.name for row in plan_rows(make_plan(tight, target="h100"))}


def test_what_was_chosen_is_said():
    plan = make_plan(preset("bench-s"), chosen=("gpus=4: few", "layout: the fastest"))
    rows = plan_rows(plan)
    assert [(row.name, row.value) for row in rows[:2]] == [
        ("gpus=4", "few"),
        ("layout", "the fastest"),
    ]
    sources = {row.name: row.source for row in rows}
    assert sources["data x pipe x tensor"] == "chosen" and sources["step"] == "given"


def test_a_size_that_was_chosen_is_not_given():
    """The rows give the same source for sizes as `Chosen`."""
    rows = {
        "layers of hidden, heads": "heads=8", "sequence, vocabulary": "vocab=4096, sequence=512",
        "computes in": "compute_dtype=bfloat16", "step": "global_batch=8",
    }  # fmt: skip
    for chosen in rows.values():
        plan = make_plan(preset("bench-s"), chosen=(f"{chosen}: not given",))
        sources = {row.name: row.source for row in plan_rows(plan)}
        assert {name for name in rows if sources[name] == "chosen"} == {
            name for name, text in rows.items() if text == chosen
        }


def test_unknown_parts_have_a_name_too():
    assert part_name("bubble_s") == "idle in the pipeline"
    assert part_name("stash_bytes") == "stash between F and B"
    assert part_name("all_new_s") == "all new" and part_name("odd_bits_bytes") == "odd bits"


COMPILED = Compiled(
    target="a100-80gb", devices=3072, backend="gpu", label="the step for 3,072 GPUs",
    hint="install [aot]", jax_version="0.10.2", arguments_bytes=5 * 2**30, outputs_bytes=5 * 2**30,
    alias_bytes=4 * 2**30, temp_bytes=70 * 2**30, compile_s=12.3, matmul_flops=4.4e19,
    formula_flops=4.0e19, compiler_peak_bytes=2**30,
    largest=(Buffer(bytes=3 * 2**30, shape="f32[4]", what="masters"),),
    collectives=(
        Traffic(kind="all-gather", axes=("tensor",), group=8, dtype="bf16", count=1024,
                bytes=2**33),
    ),
    timeline=Timeline(
        step_s=2.5,
        exposures=(Exposure(("tensor",), 1.25, 0.75), Exposure(("pipe", "data"), 0.004, 0.0)),
        spent=(
            Spent("matmul", "woven", 1.0), Spent("attention", "B", 0.25), Spent("other", "F", 0.2),
            Spent("exposed over tensor", "woven", 0.7), Spent("matmul", "head", 0.05),
        ),
        costliest=(Spent("bf16[1,2048,6144] mul", "woven", 0.123), Spent("f32[8] copy", "", 0.05)),
        tick=Tick(
            seconds=0.02, count=100, drawn_s=0.03, spent=(Spent("matmul", "woven", 0.02),),
            spans=(Span("matmul", "woven", 0.0, 0.03, False),),
        ),
    ),
)  # fmt: skip


def test_what_was_compiled_goes_through_json():
    written = json.loads(json.dumps(COMPILED.to_dict()))
    assert written["timeline"]["exposures"][0] == {
        "axes": ["tensor"],
        "seconds": 1.25,
        "exposed_s": 0.75,
    }
    assert Compiled.from_dict(written) == COMPILED


def test_what_the_compiler_says():
    plan = make_plan(preset("gpt-1t"))
    rows = compiled_rows(COMPILED, plan)
    facts = {row.name: row.value for row in rows}
    assert {row.source for row in rows} == {"compiled"}
    assert facts["what"] == "the step for 3,072 GPUs. install [aot]"
    assert facts["memory of a device"].startswith("76.00 GiB of 80 GiB: does not fit (95%")
    assert facts["matmul FLOPs"] == "4.4000e+19, 1.1000 of the formula's"
    assert facts["3.00 GiB"] == "f32[4]: masters"
    assert facts["all-gather over tensor"] == "1,024 of 8, 8.00 GiB sent in bf16"
    assert facts["over tensor"] == "1.25 s, 750 ms of it exposed"
    assert facts["123 ms"] == "bf16[1,2048,6144] mul, in woven"
    assert facts["50 ms"] == "f32[8] copy"
    assert facts["over pipe x data"] == "4 ms, 0 ms of it exposed"
    sections = {row.section for row in rows if row.name.startswith("over ")}
    assert [section for section in sections if "estimate" in section] == list(sections)
    lines = render(rows_table(rows, heading="x"), width=80)
    assert max(map(len, lines)) <= 80 and any("install [aot]" in line for line in lines)


def test_what_the_compiler_says_of_a_tight_fit():
    """The fraction to set is that of the compiled memory, not of the predicted memory."""
    tight = dataclasses.replace(COMPILED, temp_bytes=60 * 2**30)
    facts = {row.name: row.value for row in compiled_rows(tight, make_plan(preset("gpt-1t")))}
    assert facts["memory of a device"].endswith(
        "fits (82%) with XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"
    )
