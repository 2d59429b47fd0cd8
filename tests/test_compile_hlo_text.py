"""Texts of backends and versions that are not installed: GPU, older and newer `replica_groups`."""

import pytest
from errors import names

from mtx.compile.groups import axis_of, join_pairs, read_groups
from mtx.compile.hlo import read_program
from mtx.errors import UserError

MESH = {"data": 2, "tensor": 4}


def module(*lines, partitions=8, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={partitions}"
    return read_program(f"{header}\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n")


ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("written", "groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS, ("tensor",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", COLUMNS, ("data",)),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),), ("data", "tensor")),
        ("[2,4]<=[8]", ROWS, ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", COLUMNS, ("data",)),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),), ("data", "tensor")),
        ("mesh['data'=2,'tensor'=4] {'tensor'}", ROWS, ("tensor",)),
        ("mesh['data'=2,'tensor'=4] {'data'}", COLUMNS, ("data",)),
        ("mesh['a'=8] {'a':(2)4}", ROWS, ("tensor",)),
        ("mesh['a'=8] {'a':(1)2}", COLUMNS, ("data",)),
        ("mesh['tensor'=4,'data'=2] {'data','tensor'}", ((0, 2, 4, 6, 1, 3, 5, 7),), tuple(MESH)),
        ("mesh['data'=8,'tensor'=1] {'tensor'}", tuple((i,) for i in range(8)), ()),
    ],
)
def test_four_ways_to_write_groups(written, groups, axes):
    attributes = f"channel_id=1, replica_groups={written}, use_global_device_ids=true"
    assert read_groups(attributes, devices=8) == groups
    assert axis_of(groups, MESH) == axes


def test_groups_written_in_a_fifth_way_are_an_error():
    with pytest.raises(UserError) as error:
        read_groups("replica_groups=mesh['a'=2], device_ids=([1,0]) {'a'}", devices=2)
    names(error, "replica_groups", "mesh['a'=2]")


def test_groups_that_are_no_axes_are_an_error():
    with pytest.raises(UserError) as error:
        axis_of(((0, 1), (2, 3), (4, 5), (6, 7)), MESH)
    names(error, ((0, 1), (2, 3), (4, 5), (6, 7)), MESH)
    with pytest.raises(UserError) as error:
        axis_of(((7, 8),), MESH)
    names(error, ((7, 8),), MESH)


def test_axes_of_a_permute_need_no_whole_axis():
    assert axis_of(((0, 1), (4, 5)), MESH, pairs=True) == ("tensor",)


# Async pairs: a start's result lists its operands too, except in older all-reduces.
ASYNC = [
    ("all-gather-start", "(bf16[4]{0}, bf16[16]{0})", "bf16[16]{0}", "all-gather", 8, 32),
    ("reduce-scatter-start", "((bf16[4]{0}), bf16[1]{0})", "bf16[1]{0}", "reduce-scatter", 8, 2),
    ("all-reduce-start", "bf16[4]{0}", "bf16[4]{0}", "all-reduce", 8, 8),
    ("all-reduce-start", "((bf16[4]{0}), bf16[4]{0})", "bf16[4]{0}", "all-reduce", 8, 8),
]


@pytest.mark.parametrize(("opcode", "started", "done", "kind", "operand", "result"), ASYNC)
def test_async_pair_is_one_collective(opcode, started, done, kind, operand, result):
    program = module(
        "%p = bf16[4]{0} parameter(0)",
        f"%s = {started} {opcode}(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}}, "
        'metadata={op_name="jit(step)/x" stack_frame_id=3}, '
        'backend_config={"collective_backend_config":{"is_sync":false}}',
        f"ROOT %d = {done} {kind}-done(%s)",
    )
    (collective,) = program.collectives()
    assert (collective.kind, collective.count) == (kind, 1)
    assert (collective.operand_bytes, collective.result_bytes) == (operand, result)
    assert (collective.axes(MESH), collective.op_name) == (("tensor",), "jit(step)/x")


def test_async_permute_with_contexts():
    program = module(
        "%p = f32[4]{0:T(256)} parameter(0)",
        "%s = (f32[4]{0:T(256)}, f32[4]{0:T(256)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), source_target_pairs={{0,4},{4,0}}",
        "ROOT %d = f32[4]{0} collective-permute-done(%s)",
    )
    (collective,) = program.collectives()
    assert collective.groups == ((0, 4), (4, 0))
    assert (collective.operand_bytes, collective.result_bytes) == (16, 16)
    assert collective.axes(MESH) == ("data",)


def test_collective_in_an_async_wrapper():
    program = module(
        "%p = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[1]{0}) async-start(%p), calls=%wrapped",
        "ROOT %d = f32[1]{0} async-done(%s), calls=%wrapped",
        before="%wrapped (q: f32[4]) -> f32[1] {\n  %q = f32[4]{0} parameter(0)\n"
        "  ROOT %r = f32[1]{0} reduce-scatter(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, "
        "dimensions={0}, to_apply=%add\n}\n",
    )
    assert [(c.kind, c.count) for c in program.collectives()] == [("reduce-scatter", 1)]


GEMM = (
    'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{'
    '"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas(target):
    program = module(
        "%a = bf16[6,8,16]{2,1,0} parameter(0)",
        "%b = bf16[6,16,32]{2,1,0} parameter(1)",
        "ROOT %c = (bf16[6,8,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), "
        f'custom_call_target="{target}", {GEMM}',
    )
    assert program.matmul_flops() == 2 * 6 * 8 * 16 * 32
    assert program.custom_calls() == {target: 1}


def test_onednn_whichever_operand_is_transposed():
    program = module(
        "%a = f32[6,16,8]{2,1,0} parameter(0)",
        "%b = f32[6,16,32]{2,1,0} parameter(1)",
        'ROOT %c = f32[6,8,32]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul", '
        'backend_config={"onednn_matmul_config":{"transpose_a":true}}',
    )
    assert program.matmul_flops() == 2 * 6 * 8 * 16 * 32


# cuDNN's configuration as XLA of jax 0.10 writes it, and as jax 0.12.0.1 compiled it for an H100:
# with spaces, and with more nested in it than the scores' shape.
FMHA_0_10 = (
    '{"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0"},'
    '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","8","64","64"],'
    '"layout":{"minor_to_major":["3","2","1","0"]}},"mask_type":"CAUSAL"}}'
)
FMHA_0_12 = (
    '{"operation_queue_id": "0", "cudnn_fmha_backend_config": {"algorithm": {"algo_id": "0", '
    '"math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"}, "workspace_size": "0"}'
    ', "fmha_scale": 0.08838834764831843, "intermediate_tensor_shape": {"element_type": "BF16", '
    '"dimensions": ["2", "8", "64", "64"], "tuple_shapes": [], "layout": {"dim_level_types": [], '
    '"minor_to_major": ["3", "2", "1", "0"], "tiles": []}, "is_dynamic_dimension": [false, false, '
    'false, false]}, "is_flash_attention": true, "mask_type": "CAUSAL", '
    '"bmm1_dot_dimension_numbers": {"lhs_contracting_dimensions": ["3"]}, "dropout_rate": 0.0}}'
)


@pytest.mark.parametrize("config", [FMHA_0_10, FMHA_0_12, FMHA_0_10.replace('"', '\\"')])
def test_cudnn_attention_counts_the_full_square(config):
    quoted = f'"{config}"' if "\\" in config else config  # as XLA used to write it
    q, v = "bf16[2,64,8,32]{3,2,1,0}", "bf16[2,64,8,16]{3,2,1,0}"
    program = module(
        f"%q = {q} parameter(0)",
        f"%v = {v} parameter(1)",
        f"%o = ({v}, f32[2,8,64]{{2,1,0}}, u8[0]{{0}}) custom-call(%q, %q, %v), "
        f'custom_call_target="__cudnn$fmhaSoftmax", backend_config={quoted}',
        f"ROOT %g = ({q}, {q}, {v}, u8[0]{{0}}) custom-call(%q, %q, %v), "
        f'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={quoted}',
    )
    assert program.matmul_flops() == 2 * (2 * 8 * 64 * 64) * ((1 + 3) * 32 + (1 + 2) * 16)


@pytest.mark.parametrize(
    "config",
    [
        "",
        ', backend_config={"cudnn_fmha_backend_config":{}}',
        ', backend_config={name = "triton", grid_x = 1 : i32}',
    ],
)
def test_a_library_call_whose_sizes_are_not_said_is_an_error(config):
    program = module(
        "%q = bf16[2,64,8,32]{3,2,1,0} parameter(0)",
        "ROOT %o = bf16[2,64,8,32]{3,2,1,0} custom-call(%q, %q, %q), "
        f'custom_call_target="__cudnn$fmhaSoftmax"{config}',
    )
    with pytest.raises(UserError) as error:
        program.matmul_flops()
    names(error, "o", "__cudnn$fmhaSoftmax")


def test_matmuls_that_cannot_be_read_are_errors_and_other_calls_are_not():
    line = 'ROOT %c = f32[8]{{0}} custom-call(), custom_call_target="{}"'
    with pytest.raises(UserError) as error:
        module(line.format("__cublas$lt$groupedMatmul")).matmul_flops()
    names(error, "__cublas$lt$groupedMatmul")
    with pytest.raises(UserError) as error:
        module(
            "%p = f32[8,8]{1,0} parameter(0)",
            "ROOT %c = f32[8,8]{1,0} ragged-dot(%p, %p, %p), lhs_contracting_dims={1}",
        ).matmul_flops()
    names(error, "c", "ragged-dot")
    norm = module(line.format("__onednn$layernorm"))
    assert norm.matmul_flops() == 0
    assert norm.custom_calls() == {"__onednn$layernorm": 1}


def test_predicated_conditional_names_its_branches_apart():
    branch = (
        "%{0} (q: f32[8,8]) -> f32[8,8] {{\n  %q = f32[8,8]{{1,0}} parameter(0)\n"
        "  ROOT %r = f32[8,8]{{1,0}} {1}(%q, %q), "
        "lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}\n}}\n"
    )
    program = module(
        "%p = pred[] parameter(0)",
        "%x = f32[8,8]{1,0} parameter(1)",
        "ROOT %c = f32[8,8]{1,0} conditional(%p, %x, %x), true_computation=%yes, "
        "false_computation=%no",
        before=branch.format("yes", "dot") + branch.format("no", "add"),
    )
    assert program.matmul_flops(lambda conditional: (1, 0)) == 2 * 8**3
    assert program.matmul_flops(lambda conditional: (0, 1)) == 0


def test_text_inside_names_and_constants_is_not_read():
    program = module(
        '%k = u8[24]{0} constant("a dot(%x, %y) } and (")',
        "%a = f32[4,4]{1,0} parameter(0), metadata={op_name=\"x['calls=%nothing'](\"}",
        "ROOT %d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, "
        'rhs_contracting_dims={0}, metadata={op_name="a{b\\"c}, calls=%nothing" stack_frame_id=1}',
    )
    assert program.matmul_flops() == 2 * 4**3


# -- bytes that a device sends ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "result", "opcode", "sent"),
    [
        ("bf16[16]", "bf16[16]", "all-reduce", 2 * 32 * 3 / 4),
        ("bf16[4]", "bf16[16]", "all-gather", 32 * 3 / 4),
        ("bf16[16]", "bf16[4]", "reduce-scatter", 32 * 3 / 4),
        ("bf16[16]", "bf16[16]", "all-to-all", 32 * 3 / 4),
    ],
)
def test_bytes_sent_by_a_ring(operand, result, opcode, sent):
    program = module(
        f"%p = {operand}{{0}} parameter(0)",
        f"ROOT %a = {result}{{0}} {opcode}(%p), replica_groups=[2,4]<=[8], dimensions={{0}}",
    )
    (collective,) = program.collectives()
    assert (collective.group, collective.sent_bytes) == (4, sent)


def test_a_permute_sends_its_operand_along_rings():
    program = module(
        "%p = bf16[16]{0} parameter(0)",
        "ROOT %c = bf16[16]{0} collective-permute(%p), source_target_pairs="
        "{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}",
    )
    (collective,) = program.collectives()
    assert (collective.group, collective.sent_bytes) == (4, 32)
    assert join_pairs(((3, 2), (1, 0), (2, 1), (8, 9))) == ((0, 1, 2, 3), (8, 9))


# -- TPU: matmuls are convolutions, loops do not state their trip counts ---------------------------


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "products"),
    [
        ("[64,32]", "[32,48]", "[64,48]", "dim_labels=bf_io->bf", 64 * 32 * 48),
        ("[1,64,32]", "[48,32,1]", "[1,64,48]", "window={size=1}, dim_labels=0bf_oi0->0bf",
         64 * 32 * 48),
        # [64, 4*32] x [4*32, 48]: the contraction goes over the window's positions as well.
        ("[4,32,64]", "[4,32,48]", "[64,48,1]", "window={size=4}, dim_labels=0fb_0io->bf0",
         4 * 32 * 64 * 48),
        # A batch of 2 products [64, 32] x [32, 48], each with its own output, written in both ways.
        ("[2,64,32]", "[2,32,48]", "[2,64,48]",
         "window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf", 2 * 64 * 32 * 48),
        ("[2,64,32]", "[2,32,48]", "[2,64,48]",
         "window={size=2 stride=2 pad=1_1 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
         2 * 64 * 32 * 48),
        # A real convolution: at both ends one of three taps meets the padding.
        ("[8,10,3]", "[3,3,5]", "[8,10,5]", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
         8 * (10 * 3 - 2) * 3 * 5),
    ],
)  # fmt: skip
def test_convolutions_count_what_is_not_padding(left, right, result, attributes, products):
    program = module(
        f"%a = f32{left}{{0}} parameter(0)",
        f"%b = f32{right}{{0}} parameter(1)",
        f"ROOT %c = f32{result}{{0}} convolution(%a, %b), {attributes}",
    )
    assert program.matmul_flops() == 2 * products


LOOP = """
%body (q: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %q = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %x = f32[8,8]{{1,0}} get-tuple-element(%q), index=1
  %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%test (q: (s32[], f32[8,8])) -> pred[] {{
  %q = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant({bound})
  ROOT %lt = pred[] compare(%i, %n), direction={direction}
}}
"""


def test_a_loop_that_counts_to_a_constant_says_how_often_it_runs():
    lines = (
        "%p = (s32[], f32[8,8]{1,0}) parameter(0)",
        "ROOT %w = (s32[], f32[8,8]{1,0}) while(%p), condition=%test, body=%body",
    )
    program = module(*lines, before=LOOP.format(bound=12, direction="LT"))
    assert program.matmul_flops() == 12 * 2 * 8**3
    program = module(*lines, before=LOOP.format(bound=12, direction="NE"))
    with pytest.raises(UserError) as error:
        program.matmul_flops()
    names(error, "trip_counts")
    assert program.matmul_flops(trip_counts=2.5) == 2.5 * 2 * 8**3


def test_arguments_by_the_callers_names():
    program = module(
        "%p.1 = f32[4]{0} parameter(1), metadata={op_name=\"state.params[\\'w\\']\"}",
        "ROOT %p.0 = f32[8]{0} parameter(0)",
    )
    assert program.arguments() == {1: "state.params[\\'w\\']", 0: ""}
