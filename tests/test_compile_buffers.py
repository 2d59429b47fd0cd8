"""The reader of XLA's buffer assignment, on a text in which everything relevant occurs once."""

from mtx.compile.buffers import largest_buffers, read_places
from mtx.compile.hlo import read_program
from mtx.compile.hlo_text import Shape
from mtx.plan.compiled import Buffer

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 4000, parameter 1, shape |f32[10,100]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=4000,offset=0): f32[10,100]{1,0}
 value: <2 copy.9 @0> (size=4000,offset=0): f32[10,100]{1,0}
allocation 1: size 64, page 0, thread-local:
 value: <3 add.3 @0> (size=64,offset=0): f32[16]{0}
allocation 2: size 12000, page 0, preallocated-temp:
 value: <4 fusion.1 @0> (size=2000,offset=6000): bf16[1000]{0}
 value: <5 while.2{1} (phi) @0> (size=6000,offset=0): bf16[3,1,1000]{2,1,0:T(8,128)(2,1)S(1)}
 value: <6 while.2{} (phi) @0> (size=16,offset=11000): (s32[], bf16[3,1,1000]{2,1,0})
 value: <7 fusion.2 @0> (size=2000,offset=6000): f32[500]{0}
 value: <8 fusion.3 @0> (size=2400,offset=5600): f32[600]{0}
 value: <9 fusion.4 @0> (size=3000,offset=8000): f32[750]{0}
allocation 3: size 8, constant:
 value: <10 constant.1 @0> (size=8,offset=0): f32[2]{0}

Total bytes used: 16072 (15.7KiB)
"""
PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (p: f32[10,100]) -> f32[10,100] {
  %param.1 = f32[10,100]{1,0} parameter(1), metadata={op_name="state.params[\\'block\\'][\\'w\\']"}
  %fusion.1 = bf16[1000]{0} fusion(%param.1), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/pipeline/while/body/B/while/body/mul"}
  %fusion.2 = f32[500]{0} fusion(%param.1), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/pipeline/while/body/B/while/body/mul"}
  %fusion.4 = f32[750]{0} fusion(%param.1), kind=kLoop, calls=%f, metadata={op_name="jit(step)/shard_map/update/add"}
  ROOT %copy.9 = f32[10,100]{1,0} copy(%param.1)
}
"""  # noqa: E501


def test_places_do_not_overlap_and_the_largest_come_first():
    places = read_places(ASSIGNMENT)
    assert [(place.bytes, place.parameter) for place in places] == [
        (6000, None), (4000, 1), (3000, None), (2000, None), (64, None), (8, None),
    ]  # fmt: skip
    # The tuple is not an array; fusion.3 spans two places and is not counted twice.
    assert [tenant.name for tenant in places[3].tenants] == ["fusion.1", "fusion.2"]
    assert sum(place.bytes for place in places if place.parameter is None) <= 12000 + 64 + 8


def test_largest_buffers_say_what_they_hold():
    stash = {Shape(dtype="bf16", dims=(3, 1, 1000)): "stash"}
    largest = largest_buffers(ASSIGNMENT, read_program(PROGRAM), stash.get, count=4)
    assert largest == (
        Buffer(bytes=6000, shape="bf16[3,1,1000]", what="stash"),
        Buffer(bytes=4000, shape="f32[10,100]", what="argument state.params block.w"),
        Buffer(bytes=3000, shape="f32[750]", what="update: add"),
        Buffer(bytes=2000, shape="bf16[1000]", what="B: mul"),
    )


def test_a_place_whose_op_is_not_known_is_named_by_its_instruction():
    (buffer,) = largest_buffers(ASSIGNMENT, read_program(PROGRAM), {}.get, count=1)
    assert buffer.what == "while.2"


def test_a_text_without_allocations_has_no_buffers():
    assert largest_buffers("", read_program(PROGRAM), {}.get) == ()
