"""How much of its collectives a compiled schedule hides, on schedules with seconds counted by hand.

Two stages of four tensor shards, a node each. A matmul takes 1 s, a gather over `tensor` 3 s, a
send over `pipe` 2 s; memory takes practically no time.
"""

from dataclasses import replace
from functools import partial

import pytest

from mtx.compile.hlo import read_program
from mtx.compile.hlo_work import moved_bytes
from mtx.compile.machine import Machine
from mtx.compile.overlap import timeline
from mtx.plan.calibration import calibration_of
from mtx.plan.gemm import matmul_s
from mtx.plan.hardware import hardware

MESH = {"pipe": 2, "data": 1, "tensor": 4}
SLOW = replace(
    hardware("h100"), node_devices=4, link_gb_s=1e-3, network_gb_s=1e-3, memory_gb_s=1e12,
    peak_tflops={"bfloat16": 1e-3, "float8": 2e-3}, cores=1, tile=(1, 1),
)  # fmt: skip
EXACT = replace(
    calibration_of(SLOW, "mtx"), matmul_share=1.0, memory_share=1.0, network_share=1.0,
    send_share=1.0, link_share=1.0, attention_share=0.5, link_latency_s=0.0, network_latency_s=0.0,
    matmul_depth=0.0, kernel_s=0.0,
)  # fmt: skip
MACHINE = Machine(hardware=SLOW, calibration=EXACT, mesh_shape=MESH)

PARTS = (
    "%p = bf16[1000,1000]{1,0} parameter(0)",
    "%q = bf16[1000,500]{1,0} parameter(1)",
    "%r = bf16[500000]{0} parameter(2)",
    "%x = bf16[1000000]{0} parameter(3)",
)
TENSOR = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
PIPE = "source_target_pairs={{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}"


def gather(name, more=""):
    start = f"%{name} = ((bf16[500000]{{0}}), bf16[2000000]{{0}}) all-gather-start(%r), {TENSOR}"
    return start + more, f"%{name}.done = bf16[2000000]{{0}} all-gather-done(%{name})"


def send(name):
    shapes = "((bf16[1000000]{0}), bf16[1000000]{0})"
    start = f"%{name} = {shapes} collective-permute-start(%x), {PIPE}"
    return start, f"%{name}.done = bf16[1000000]{{0}} collective-permute-done(%{name})"


def matmuls(count, name="dot", of=("p", "q")):
    contracting = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return tuple(
        f"%{name}.{n} = bf16[1000,500]{{1,0}} dot(%{of[0]}, %{of[1]}), {contracting}"
        for n in range(count)
    )


def computation(name, *lines, entry=""):
    return f"{entry}%{name} (a: f32[]) -> f32[] {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n"


def whole(*lines, before="", branch=lambda conditional: (0.5, 0.5), **options):
    """The timeline of a program whose entry has these lines."""
    header = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
    text = header + before + computation("main", *PARTS, *lines, entry="ENTRY ")
    return timeline(read_program(text), MACHINE, branch, **options)


def replay(*lines, **options):
    """{axes: (seconds, exposed)} of a program whose entry has these lines."""
    found = whole(*lines, **options)
    spent_s = sum(one.seconds for one in found.spent)
    assert spent_s > found.step_s - 1e-6  # more if there is a start without a done
    rows = found.exposures
    assert list(rows) == sorted(rows, key=lambda row: -row.exposed_s)
    return {
        row.axes: (pytest.approx(row.seconds, abs=1e-6), pytest.approx(row.exposed_s, abs=1e-6))
        for row in rows
    }


@pytest.mark.parametrize(("inside", "exposed"), [(0, 3), (1, 2), (2, 1), (3, 0), (5, 0)])
def test_exposed_is_what_the_matmuls_inside_do_not_cover(inside, exposed):
    start, done = gather("g")
    lines = (start, *matmuls(inside), done, *matmuls(2, "after"))
    assert replay(*lines) == {("tensor",): (3, exposed)}


def test_a_synchronous_collective_is_wholly_exposed():
    plain = f"%g = bf16[2000000]{{0}} all-gather(%r), {TENSOR}"
    assert replay(*matmuls(4, "a"), plain, *matmuls(4, "b")) == {("tensor",): (3, 3)}
    for config in ('{"is_sync":true}', '{"collective_backend_config":{"is_sync":true}}'):
        start, done = gather("g", f", backend_config={config}")
        assert replay(start, *matmuls(4), done) == {("tensor",): (3, 3)}


def test_bookkeeping_covers_nothing():
    start, done = gather("g")
    small = ("%i = s32[] add(%n, %n)", "%b = bf16[1000000]{0} bitcast(%p)")
    lines = ("%n = s32[] constant(1)", start, *small, done)
    assert replay(*lines) == {("tensor",): (3, 3)}


def test_collectives_on_one_link_wait_for_each_other_and_on_two_do_not():
    (one, one_done), (two, two_done), (other, other_done) = gather("g"), gather("h"), send("s")
    lines = (one, two, *matmuls(3), one_done, two_done)
    assert replay(*lines) == {("tensor",): (6, 3)}
    lines = (one, other, *matmuls(3), one_done, other_done)
    assert replay(*lines) == {("tensor",): (3, 0), ("pipe",): (2, 0)}
    # Each second counts once: what the first one's wait covers of the other is not exposed again.
    lines = (one, other, *matmuls(1), one_done, other_done)
    assert replay(*lines) == {("tensor",): (3, 2), ("pipe",): (2, 0)}


def loop(name, trips, known=True):
    count = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if known else ""
    return f"%{name} = (bf16[4]{{0}}) while(%t), condition=%test, body=%{name}_body{count}"


TEST = computation("test", "%c = pred[] constant(true)")
ARGUMENTS = "%t = (bf16[4]{0}) tuple(%p)"


def test_nested_loops_multiply():
    start, done = gather("g")
    send_start, send_done = send("s")
    inner = computation("inner_body", *PARTS, start, *matmuls(1), done)
    outer = computation(
        "outer_body", *PARTS, ARGUMENTS, send_start, loop("inner", 4), send_done, *matmuls(1)
    )
    lines = (ARGUMENTS, loop("outer", 5))
    expected = {("tensor",): (5 * 4 * 3, 5 * 4 * 2), ("pipe",): (5 * 2, 0)}
    assert replay(*lines, before=TEST + inner + outer) == expected


def test_a_loop_of_matmuls_covers_as_often_as_it_runs():
    start, done = gather("g")
    body = computation("inner_body", *PARTS, *matmuls(1))
    lines = (ARGUMENTS, start, loop("inner", 2), done)
    assert replay(*lines, before=TEST + body) == {("tensor",): (3, 1)}
    lines = (ARGUMENTS, start, loop("inner", 0, known=False), done)
    assert replay(*lines, before=TEST + body, trip_counts=1.5) == {("tensor",): (3, 1.5)}


@pytest.mark.parametrize("last", ["received", "left"])  # a send left in flight is exposed
@pytest.mark.parametrize(
    ("order", "exposed"),
    [
        # Received before the matmul that follows: 1 send into the loop and 10 in it, each alone.
        (("done", "matmul", "start"), 11 * 2),
        # The matmul of the next iteration lies beside it; after the last one nothing does.
        (("matmul", "done", "start"), 10 * 1 + 2),
    ],
)
def test_a_send_may_end_in_the_next_iteration(order, exposed, last):
    shapes = "((bf16[1000000]{0}), bf16[1000000]{0})"
    lines = {
        "done": "%d = bf16[1000000]{0} collective-permute-done(%flight)",
        "matmul": matmuls(1)[0],
        "start": f"%s = {shapes} collective-permute-start(%x), {PIPE}",
    }
    body = computation(
        "outer_body",
        f"%a = (bf16[4]{{0}}, {shapes}) parameter(0)",
        f"%flight = {shapes} get-tuple-element(%a), index=1",
        "%p = bf16[1000,1000]{1,0} constant({...})",
        "%q = bf16[1000,500]{1,0} constant({...})",
        "%x = bf16[1000000]{0} constant({...})",
        *(lines[each] for each in order),
        f"ROOT %out = (bf16[4]{{0}}, {shapes}) tuple(%p, %s)",
    )
    first, _ = send("first")
    result = replay(
        first,
        f"%t = (bf16[4]{{0}}, {shapes}) tuple(%p, %first)",
        loop("outer", 10),
        f"%last = {shapes} get-tuple-element(%outer), index=1",
        *["%d = bf16[1000000]{0} collective-permute-done(%last)"][: last == "received"],
        before=TEST + body,
    )
    assert result == {("pipe",): (11 * 2, exposed)}


def test_a_conditional_takes_the_mean_of_its_branches():
    start, done = gather("g")
    works, rests = computation("yes", *PARTS, *matmuls(4)), computation("no", *PARTS)
    choice = "%c = bf16[4]{0} conditional(%p, %p, %q), branch_computations={%no, %yes}"
    before = works + rests
    assert replay(start, choice, done, before=before) == {("tensor",): (3, 1)}
    seldom = replay(start, choice, done, before=before, branch=lambda _: (0.75, 0.25))
    assert seldom == {("tensor",): (3, 2)}
    # And a collective inside a branch counts as often as the branch is taken.
    gathers = computation("yes", *PARTS, start, *matmuls(1), done)
    assert replay(choice, before=gathers + rests) == {("tensor",): (1.5, 1)}


def test_of_stages_that_differ_all_wait_for_the_longest_branch():
    """The work of the others is not counted, nor do their collectives occupy a link."""
    (start, done), (inner, inner_done) = gather("g"), gather("h")
    works = computation("yes", *PARTS, *matmuls(4))
    gathers = computation("no", *PARTS, inner, inner_done)
    choice = "%c = bf16[4]{0} conditional(%p, %p, %q), branch_computations={%no, %yes}"
    before, longest = works + gathers, lambda _: ()
    assert replay(choice, start, done, before=before, branch=longest) == {("tensor",): (3, 3)}
    assert replay(start, choice, done, before=before, branch=longest) == {("tensor",): (6, 6)}


def test_what_runs_beside_a_conditional_with_collectives():
    (inner, inner_done), (outer, outer_done) = gather("g"), send("s")
    before = computation("yes", *PARTS, inner, inner_done) + computation("no", *PARTS)
    choice = "%c = bf16[4]{0} conditional(%p, %p, %q), branch_computations={%no, %yes}"
    result = replay(outer, choice, outer_done, before=before)
    assert result == {("tensor",): (1.5, 1.5), ("pipe",): (2, 0.5)}


def test_async_wrappers_start_the_collective_inside():
    wrapped = computation(
        "wrapped", "%r = bf16[2000000]{0} parameter(0)",
        f"ROOT %s = bf16[500000]{{0}} reduce-scatter(%r), {TENSOR}, to_apply=%add",
    )  # fmt: skip
    shapes = "((bf16[2000000]{0}), bf16[500000]{0})"
    done = "%done = bf16[500000]{0} async-done(%w)"
    lines = (f"%w = {shapes} async-start(%x), calls=%wrapped", *matmuls(2), done)
    assert replay(*lines, before=wrapped) == {("tensor",): (3, 1)}
    send_too = f"%c = bf16[1000000]{{0}} collective-permute(%y), {PIPE}"
    both = wrapped.replace(
        "  ROOT", f"  %y = bf16[1000000]{{0}} parameter(1)\n  {send_too}\n  ROOT"
    )
    lines = (f"%w = {shapes} async-start(%x, %x), calls=%wrapped", *matmuls(1), done)
    assert replay(*lines, before=both) == {("tensor",): (3, 1), ("pipe",): (2, 1)}


def test_a_start_whose_done_is_not_there_is_wholly_exposed():
    start, _ = gather("g")
    assert replay(start, *matmuls(5)) == {("tensor",): (3, 3)}


def test_groups_of_one_device_take_no_time():
    alone = TENSOR.replace("{0,1,2,3},{4,5,6,7}", ",".join(f"{{{n}}}" for n in range(8)))
    assert replay(f"%g = bf16[2000000]{{0}} all-gather(%r), {alone}") == {}


def test_an_all_reduce_is_two_gathers_and_a_send_in_a_node_does_not_use_the_network():
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"
    result = replay(f"%g = bf16[2000000]{{0}} all-reduce(%x), {groups}")
    # Eight devices in two nodes of four cards each, with the slower links: 2 x 4 MB x 7/8.
    assert result == {("pipe", "tensor"): (7, 7)}
    near = "source_target_pairs={{0,1},{1,2},{2,3},{4,5}}"
    (one, one_done), (two, two_done) = gather("g"), send("s")
    two = two.replace(PIPE, near)
    assert replay(one, two, *matmuls(1), one_done, two_done) == {("tensor",): (3 + 2, 4)}


def test_matmuls_in_fusions_float8_and_fused_attention_have_their_rates():
    start, done = gather("g")
    inside = computation("inside", *PARTS, *matmuls(2))
    fusion = "%f = bf16[1000,500]{1,0} fusion(%p, %q, %r, %x), kind=kCustom, calls=%inside"
    assert replay(start, fusion, done, before=inside) == {("tensor",): (3, 1)}
    # Twice the FLOP/s of bfloat16.
    float8 = "%p8 = f8e4m3fn[1000,1000]{1,0} constant(0)"
    assert replay(float8, start, *matmuls(2, of=("p8", "q")), done) == {("tensor",): (3, 2)}
    # q of 1 x 100 x 10 x 500, scores of 10 x 100 x 100: 2e8 FLOPs, half of them under the mask.
    shape = '"intermediate_tensor_shape": {"dimensions": ["1", "10", "100", "100"]}'
    config = f'{{"cudnn_fmha_backend_config": {{{shape}, "mask_type": "CAUSAL"}}}}'
    q = "%h = bf16[1,100,10,500]{3,2,1,0} constant(0)"
    call = "%o = (bf16[1,100,10,500]{3,2,1,0}, u8[0]{0}) custom-call(%h, %h, %h), "
    call += f'custom_call_target="__cudnn$fmhaSoftmax", backend_config={config}'
    assert replay(q, start, call, done) == {("tensor",): (3, 3 - 0.2)}


@pytest.mark.parametrize(
    ("lines", "moved"),
    [
        (("%o = f32[8,16]{1,0} add(%a, %a)",), 2 * 512),
        (("%o = f32[8,16]{1,0} bitcast(%a)",), 0),
        (("%o = f32[1,16]{1,0} dynamic-slice(%a, %i, %i)",), 64 + 4 + 64),
        (("%o = f32[8,16]{1,0} dynamic-update-slice(%a, %u, %i, %i)",), 64 + 4 + 64),
        (("%o = f32[8,16]{1,0} fusion(%a, %u, %i), calls=%writes",), 64 + 4 + 64),
        (("%o = f32[1,16]{1,0} fusion(%a, %u, %i), calls=%reads",), 64 + 64 + 4 + 64),
        (("%o = (f32[1,16]{1,0}) fusion-start(%a, %u, %i), calls=%reads",), 64 + 64 + 4 + 64),
        (("%o = f32[1,16]{1,0} fusion(%a, %u, %i), calls=%nested",), 64 + 64 + 4 + 64),
    ],
)
def test_bytes_that_an_instruction_moves(lines, moved):
    """Only the slice of a stack that is read or written counts, in fusions too."""
    parameters = (
        "%a = f32[8,16]{1,0} parameter(0)", "%u = f32[1,16]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
    )  # fmt: skip
    update = "%o = f32[8,16]{1,0} dynamic-update-slice(%a, %u, %i, %i)"
    read = "%s = f32[1,16]{1,0} dynamic-slice(%a, %i, %i)"
    total = "%o = f32[1,16]{1,0} add(%s, %u)"
    call = "%o = f32[1,16]{1,0} fusion(%a, %u, %i), calls=%reads"
    text = "HloModule m, num_partitions=1\n" + "".join(
        (
            computation("writes", *parameters, update),
            computation("reads", *parameters, read, total),
            computation("nested", *parameters, call),
            computation("main", *parameters, *lines, entry="ENTRY "),
        )
    )
    program = read_program(text)
    main = program.computations["main"]
    assert moved_bytes(program.computations, main, main["o"]) == moved


def test_the_costliest_is_neither_matmul_nor_collective():
    """Equal ops in the same part of the step count together; in a loop, as often as it runs."""

    def line(name, how, scope):
        named = f'metadata={{op_name="jit(step)/pipeline/{scope}/{how}"}}'
        return f"%{name} = bf16[1000000]{{0}} {how}(%x, %x), {named}"

    start, done = gather("g")
    text = "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n" + computation(
        "main", *PARTS, start, *matmuls(1), done,
        line("a", "add", "head"), line("b", "add", "head"), line("d", "add", "update"),
        line("c", "multiply", "while/body/woven/cond"), entry="ENTRY ",
    )  # fmt: skip
    slow = replace(MACHINE, hardware=replace(SLOW, memory_gb_s=1e-3))
    first, *others = timeline(read_program(text), slow, lambda _: (0.5, 0.5)).costliest
    assert (first.what, first.part) == ("bf16[1000000] add", "head")
    assert {(one.what, one.part) for one in others} == {
        ("bf16[1000000] multiply", "woven"),
        ("bf16[1000000] add", "update"),
    }
    assert all(first.seconds == pytest.approx(2 * one.seconds) and one.seconds for one in others)


def test_a_tick_is_one_iteration_of_the_loop_that_takes_longest():
    """To scale: 3 s over `tensor` with 2 matmuls beside it, then 1 s in a rarely taken branch."""
    start, done = gather("g")
    named = 'metadata={op_name="jit(step)/pipeline/while/body/head/cond/dot_general"}'
    often = computation("often", *PARTS)
    seldom = computation("seldom", *PARTS, *(f"{line}, {named}" for line in matmuls(1)))
    choice = "%c = bf16[4]{0} conditional(%p, %p, %q), branch_computations={%often, %seldom}"
    body = computation("long_body", *PARTS, start, *matmuls(2), done, choice)
    short = computation("short_body", *PARTS, *matmuls(1))
    lines = (ARGUMENTS, loop("short", 9), loop("long", 4))
    options = {"before": TEST + often + seldom + short + body, "branch": lambda _: (0.75, 0.25)}
    found = whole(*lines, **options)
    tick = found.tick
    assert found.step_s == pytest.approx(9 + 4 * 3.25) and tick.count == 4
    assert tick.seconds == pytest.approx(3.25) and tick.drawn_s == pytest.approx(4)
    spent = {(one.what, one.part): pytest.approx(one.seconds, abs=1e-6) for one in tick.spent}
    assert spent == {
        ("matmul", ""): 2, ("matmul", "head"): 0.25, ("exposed over tensor", ""): 1
    }  # fmt: skip
    spans = {
        (one.row, one.part, one.exposed, round(one.start_s, 6), round(one.seconds, 6))
        for one in tick.spans
    }
    assert spans == {
        ("tensor", "", False, 0, 3), ("matmul", "", False, 0, 2), ("tensor", "", True, 2, 1),
        ("matmul", "head", False, 3, 1),
    }  # fmt: skip


def test_a_matmul_takes_what_the_planner_says_of_its_sizes():
    """Sizes are read off its shapes, in tiles and waves. Batched matmuls are attention's."""
    machine = Machine.of(hardware("h100"), mesh_shape=MESH)
    matmul = partial(
        matmul_s, hardware=machine.hardware, calibration=machine.calibration, dtype="bfloat16"
    )
    lines = (
        "%a = bf16[300,64]{1,0} parameter(0)", "%b = bf16[200,64]{1,0} parameter(1)",
        "%o = bf16[300,200]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "%q = bf16[6,300,64]{2,1,0} parameter(2)", "%k = bf16[6,64,200]{2,1,0} parameter(3)",
        "%s = bf16[6,300,200]{2,1,0} dot(%q, %k), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}",
    )  # fmt: skip
    program = read_program("HloModule m, num_partitions=1\n" + computation(
        "main", *lines, entry="ENTRY "
    ))  # fmt: skip
    main = program.computations["main"]
    compute = partial(machine.compute, program, main)
    assert compute(main["o"]) == ("matmul", pytest.approx(matmul(300, 200, 64)))
    assert compute(main["s"]) == ("attention", pytest.approx(matmul(300, 200, 64, batch=6)))
