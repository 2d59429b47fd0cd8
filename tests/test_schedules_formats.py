"""Schedules in files: exact both ways; every mistake is one line with its row and column."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from errors import names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtx.errors import UserError
from mtx.schedules import formats
from mtx.schedules.formats import (
    from_csv,
    from_dict,
    from_json,
    from_text,
    read_schedule,
    to_csv,
    to_dict,
    to_text,
)
from mtx.schedules.makers import MAKERS, make
from mtx.schedules.orders import Orders
from mtx.schedules.schedule import Schedule

quick = settings(max_examples=60, deadline=None)
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PLACE = re.compile(r"row \d+, column \d+")


@st.composite
def schedules(draw) -> Schedule:
    """Any maker's table, perhaps with empty ticks added."""
    name = draw(st.sampled_from(sorted(MAKERS)))
    known = MAKERS[name]
    made = make(
        name,
        microbatches=draw(st.integers(1, 7)),
        stages=draw(st.integers(1, 5)),
        virtual=known.virtual or draw(st.integers(1, 3)),
        slices=draw(st.integers(1, 3)) if known.sliced else 1,
    )
    gaps = draw(st.lists(st.integers(0, 2), min_size=made.ticks, max_size=made.ticks))
    later = np.arange(made.ticks) + np.cumsum(gaps) * draw(st.integers(0, 1))
    weight = None if made.weight_ticks is None else later[made.weight_ticks]
    return Schedule.from_ticks(
        name, later[made.forward_ticks], later[made.backward_ticks], weight,
        virtual_stages=made.virtual_stages, slices=made.slices, orders=made.orders,
    )  # fmt: skip


def assert_same_table(one: Schedule, other: Schedule) -> None:
    assert (one.slices, one.split) == (other.slices, other.split)
    for name in ("forward_ticks", "backward_ticks", "virtual_stages"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    if one.split:
        np.testing.assert_array_equal(one.weight_ticks, other.weight_ticks)


def assert_same_orders(one: Orders, other: Orders) -> None:
    for column in ("kind", "item", "chunk"):
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column))


# --- both ways ------------------------------------------------------------------------------------


@quick
@given(schedules())
def test_ticks_are_read_back_exactly(schedule):
    assert_same_table(from_csv(to_csv(schedule)), schedule)
    assert_same_table(from_text(to_text(schedule)), schedule)


@quick
@given(schedules())
def test_orders_are_read_back_exactly(schedule):
    assert_same_orders(from_csv(to_csv(schedule, orders=True)).orders, schedule.orders)
    assert_same_orders(from_text(to_text(schedule, orders=True)).orders, schedule.orders)


@quick
@given(schedules())
def test_json_holds_ticks_and_orders(schedule):
    again = from_json(json.dumps(to_dict(schedule)))
    assert_same_table(again, schedule)
    assert_same_orders(again.orders, schedule.orders)
    assert again.name == schedule.name


def test_csv_is_the_notation_of_torch():
    assert to_csv(make("1f1b", microbatches=3, stages=2)) == (
        "0F0,0F1,,0F2,0B0,,0B1,0B2\n"
        ",1F0,1B0,1F1,1B1,1F2,1B2,\n"
    )  # fmt: skip
    split = to_csv(make("zb_h1", microbatches=2, stages=2))
    assert set(re.findall("[A-Z]", split)) == {"F", "I", "W"}
    # The second chunk of a V counts its virtual stages from the last stage back.
    assert to_csv(make("zb_v", microbatches=2, stages=2), orders=True).startswith("0F0,")
    assert from_csv(to_csv(make("zb_v", microbatches=2, stages=2))).virtual_stages.tolist() == [
        [0, 1],
        [3, 2],
    ]


def test_text_is_one_row_a_stage():
    schedule = make("1f1b", microbatches=2, stages=2)
    assert to_text(schedule) == (
        "stage 0: |F0|F1   |B0   |B1|\n"
        "stage 1: |  |F0 B0|F1 B1|  |\n"
    )  # fmt: skip
    assert to_text(schedule, orders=True) == "stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1\n"
    assert to_text(make("zb_v", microbatches=1, stages=2)).startswith(
        "placement vee\nstage 0: |F0.0|"
    )


def test_text_takes_what_one_would_write():
    written = """
        # the smallest pipeline
        placement 0 1
        F0 F1 B0 B1      # labels may be left out, and so may chunks
        stage 1 :  F0 B0.0 F1 B1
    """
    assert_same_table(from_text(written), make("1f1b", microbatches=2, stages=2))
    crossed = from_text("placement 1,3 0,2\nF0.0 F0.1 B0.1 B0.0\nF0.0 F0.1 B0.1 B0.0")
    assert crossed.virtual_stages.tolist() == [[1, 0], [3, 2]]
    assert to_text(crossed).startswith("placement 1,3 0,2\n")


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_csv_is_read_as_spreadsheets_write_it(ending):
    text = '"0F0" ,0F1,0B0,0B1,,\n,1F0,1B0,1F1,1B1\n\n'.replace("\n", ending)
    assert_same_orders(from_csv(text).orders, make("1f1b", microbatches=2, stages=2).orders)


# Results of torch 2.13's get_schedule_ops for two stages and four microbatches.
TORCH = {
    "LoopedBFS": (
        "0F0,0F1,0F2,0F3,2F0,2F1,2F2,2F3,,,2B3,2B2,2B1,2B0,0B3,0B2,0B1,0B0\n"
        ",1F0,1F1,1F2,1F3,3F0,3F1,3F2,3F3,3B3,3B2,3B1,3B0,1B3,1B2,1B1,1B0"
    ),
    "Interleaved1F1B": (
        "0F0,0F1,2F0,2F1,,,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,,2B2,,2B3,,0B2,,0B3\n"
        ",1F0,1F1,,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,,1B2,,1B3"
    ),
    "ZBVZeroBubble": (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0F3,0I0,0W0,3F2,3I2,3W2,0I1,0W1,3F3,3I3,3W3,0I2,0W2,"
        "0I3,0W3\n"
        ",1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1F3,1I1,1W1,2F3,2I2,2W2,1I2,2I3,1I3,1W2,"
        "2W3,1W3"
    ),
    "DualPipeV": (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,"
        "(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,"
        "2B2,1B2,2I3,1I3,2W3,1W3"
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_s_own_tables_are_read(name):
    schedule = from_csv(TORCH[name])
    vee = name in ("ZBVZeroBubble", "DualPipeV")
    assert (schedule.stages, schedule.microbatches, schedule.virtual) == (2, 4, 2)
    assert schedule.virtual_stages.tolist() == ([[0, 1], [3, 2]] if vee else [[0, 1], [2, 3]])
    assert schedule.split == vee
    letters = {"F": "F", "I": "B", "B": "B", "W": "W"}
    for stage, row in enumerate(TORCH[name].split("\n")):
        ops = re.findall(r"(\d)([FIBW])(\d)", row)
        written = [(letters[kind], int(virtual_stage), int(m)) for virtual_stage, kind, m in ops]
        if vee:  # a whole B stands for B and W
            whole = [(virtual_stage, m) for virtual_stage, kind, m in ops if kind == "B"]
            written += [("W", int(virtual_stage), int(m)) for virtual_stage, m in whole]
        held = [("FBW"[op.kind], int(schedule.virtual_stages[op.chunk, stage]), op.item)
                for op in schedule.orders.of(stage)]  # fmt: skip
        assert sorted(held) == sorted(written)
        wholes = {("W", int(p), int(m)) for p, kind, m in ops if kind == "B"} if vee else set()
        assert [op for op in held if op not in wholes] == [op for op in written if op not in wholes]
        for kind, virtual_stage, m in wholes:
            at = held.index((kind, virtual_stage, m))
            assert held[at - 1] == ("B", virtual_stage, m)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize("wait", [False, True])
def test_communication_among_the_ops_changes_nothing(name, wait):
    """As torch writes its tables: sends and waits around the ops, parameters gathered before
    the first op of a virtual stage and freed after its last, gradients reduced at the end."""
    schedule = make(name, microbatches=6, stages=2)
    rows = []
    for row in to_csv(schedule, orders=True).splitlines():
        cells = [f"{virtual_stage}UNSHARD" for virtual_stage in range(4)]
        for cell in row.split(","):
            virtual_stage, kind, item = re.fullmatch(r"([0-9]+)([FBIW])([0-9]+)", cell).groups()
            way = "F" if kind == "F" else "B"
            cells += [f"{virtual_stage}RECV_{way}{item}", cell, f"{virtual_stage}SEND_{way}{item}"]
            cells += [f"{virtual_stage}WAIT_SEND_{way}{item}"] * wait
        cells += [f"{virtual_stage}RESHARD" for virtual_stage in range(4)] + ["0REDUCE_GRAD"]
        rows.append(",".join([*cells, *["0WAIT_REDUCE_GRAD"] * wait]))
    read = from_csv("\n".join(rows), name)
    assert_same_orders(read.orders, from_csv(to_csv(schedule, orders=True), name).orders)
    ticks = to_csv(schedule).splitlines()
    reduced = "\n".join(f"{row},0REDUCE_GRAD" for row in ticks)  # after the very last tick
    assert_same_table(from_csv(reduced, name), from_csv("\n".join(ticks), name))


def test_rows_without_gaps_are_orders_and_rows_with_them_ticks():
    orders = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert from_csv(orders).ticks == 5
    late = ",0F0,,0F1,0B0,0B1\n,,1F0,1B0,1F1,1B1\n".replace("1F0,1B0,1F1", "1F0,,1B0,1F1")
    assert from_csv(late).forward_ticks[0, 0].tolist() == [0, 1]


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "": "row 1, column 1: the row holds no op",
    "0F0,0B0\n\n1F0,1B0": "row 2, column 1: the row holds no op",
    "0F0,0X0": "row 1, column 2 (0X0): expected virtual stage, F, B, I or W, and microbatch",
    "0F0;0B0": "row 1, column 1 (0F0;0B0): expected virtual stage",
    "rank,0F0\n1F0": "row 1, column 1 (rank): expected virtual stage",
    "0UNSHARD,0REDUCE_GRAD": "row 1, column 1: the row holds no op",
    "0F0,0SEND_G0,0B0": "row 1, column 2 (0SEND_G0): expected virtual stage",
    "0F0,0I0,0F1,0I1": "row 1, column 2 (0I0): I is the input gradient alone, and no",
    "0F0,(0F1;)OVERLAP_F_B": "row 1, column 2 (nothing between two ;): expected virtual stage",
    "0F1234567": "row 1, column 1 (0F1234567): expected virtual stage",
    "0F0,0B0,0F0": "row 1, column 3 (0F0): 0F0 stands in row 1, column 1 too; an op runs once",
    "0F0,0F1,0B0": "row 1, column 2 (0F1): its 0B1 is missing",
    "0F0,0B0,0B1": "row 1, column 3 (0B1): its 0F1 is missing",
    "0F0,0I0,0W0,0F1,0I1": "row 1, column 4 (0F1): its 0W1 is missing",
    "0F0,0B0,0F2,0B2": "row 1, column 3 (0F2): microbatch 2, and microbatch 1 is missing",
    "0F0,0B0,0F1,0B1\n1F0,1B0": "row 2, column 2 (1B0): the row ends without 1F1",
    "0F0,0B0\n2F0,2B0": "row 2, column 1 (2F0): virtual stage 2, and virtual stage 1",
    "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,0B1": "row 2, column 4 (0B1): virtual stage 0 stands in row 1 to",
    "0F0,2F0,2B0,0B0\n1F0,1B0": "row 1, column 2 (2F0): stage 0 holds 2 virtual stages (0, 2), st",
    "0F0/0,0F0/1,0B0/1,0B0": "row 1, column 4 (0B0): names no slice, though other ops do",
    "0F0/0,0F0/2,0B0/2,0B0/0": "row 1, column 2 (0F0/2): slice 2, and slice 1 is missing",
    "0F0,,0B0\n1F0,1B0,": "row 2, column 1 (1F0): at microbatch 0, chunk 0, stage 1 F runs before "
    "the F of the virtual stage before it has finished",
    ",0F0,,0B0\n,,1F0,1B0": "row 1, column 4 (0B0): at microbatch 0, chunk 0, stage 0 B runs before"
    " the B of the virtual stage after it has finished",
    "0B0,0F0": "row 1, column 1 (0B0): at microbatch 0, chunk 0, stage 0 B runs before its own F",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1": "row 1, column 2 (0B0): stands still: stage 0 for the "
    "input of B0.0, stage 1 for the input of F1.0",
}  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_names_row_and_column(text):
    with pytest.raises(UserError) as caught:
        from_csv(text)
    assert str(caught.value).startswith(MISTAKES[text]) and "\n" not in str(caught.value)


TEXT_MISTAKES = {
    "# nothing": "row 1, column 1: the file holds no op",
    "F0 B0\nstage 2: F0 B0": "row 2, column 1 (stage 2:): expected stage 1 here",
    "F0 B0\nplacement vee": "row 2, column 1 (placement vee): `placement` stands once, before",
    "placement 0 2\nF0 B0\nF0 B0": "row 1, column 10 (0 2): expected placement looped, placement",
    "placement 0,1\nF0.0 F0.1 B0.1 B0.0\nF0 B0": "row 1, column 10 (0,1): expected placement loop",
    "F0 B0\n|F0|B0|": "row 2, column 7: 2 ticks, and no | on stage 0",
    "|F0|B0|\n|F0 B0|": "row 2, column 7: 1 ticks, and 2 ticks on stage 0",
    "F0|B0|": "row 1, column 1: a row in ticks begins and ends with |",
    "|B0 F0|": "row 1, column 5 (F0): one tick runs at most one F, one B and one W, in this order",
    "stage 0: |F0|I0|": "row 1, column 14 (I0): expected F, B or W with microbatch and chunk",
    "F0 F0.1 B0 B0.1": "row 1, column 1 (F0): names no chunk; stages have 2 chunks",
    "F0.7 B0.7": "row 1, column 1 (F0.7): there are fewer ops than chunks",
    "placement 0,1\nF0.0 B0.0": "row 2, column 1 (F0.0): stages have 2 chunks, and no op is of",
    "placement 0\nF0.1 B0.1": "row 2, column 1 (F0.1): stages have 1 chunk, counted from 0",
    "F0 F1 B0": "row 1, column 4 (F1): its B1 is missing",
    "|F0|  B0|F1| |B1|\n|  |F0 B0| |F1 B1| |": "row 1, column 7 (B0): at microbatch 0, chunk "
    "0, stage 0 B runs before the B of the virtual stage after it",
}


@pytest.mark.parametrize("text", TEXT_MISTAKES)
def test_a_mistake_in_text_names_row_and_column(text):
    with pytest.raises(UserError) as caught:
        from_text(text)
    assert str(caught.value).startswith(TEXT_MISTAKES[text]) and "\n" not in str(caught.value)


JSON_MISTAKES = {
    "[1]": "row 1, column 1: expected an object with `ticks` or `orders`",
    '{"ticks": ["|F0|"],\n "orders" ["F0"]}': "row 2, column 11: this is not JSON",
    '{"ticks": []}': "row 1, column 1: `ticks` must be a list with one string for each stage",
    '{"orders": ["F0 B0", 1]}': "row 1, column 1: `orders` must be a list with one string",
    '{"orders": ["F0 B0"], "placement": [[0]]}': "row 1, column 1: `placement` must be a string",
    '{"orders": ["F0 B0"], "slots": 1}': "row 1, column 1 (slots): unknown key; known are name,",
    '{"orders": ["F0 B0", "F0 X"]}': "row 2, column 4 (X): expected F, B or W",
    '{"ticks": ["|F0 B0|"], "orders": ["F0 F1 B0 B1"]}': "orders, row 1, column 1 (F0): the orders "
    "do not run the same ops as the ticks",
    '{"ticks": ["|F0 B0|"], "orders": ["|F0 B0|"]}': "orders, row 1, column 2 (F0): orders with |",
    '{"ticks": ["|F0 B0|"], "orders": ["B0 F0"]}': "orders, row 1, column 1 (B0): stands still",
    "[" * 100_000: "row 1, column 1: expected a schedule",
    '{"orders": ' + "1" * 10_000 + "}": "row 1, column 1: expected a schedule",
}


@pytest.mark.parametrize("text", JSON_MISTAKES, ids=range(len(JSON_MISTAKES)))
def test_a_mistake_in_json_is_named(text):
    with pytest.raises(UserError) as caught:
        from_json(text)
    assert str(caught.value).startswith(JSON_MISTAKES[text]) and "\n" not in str(caught.value)


def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path, monkeypatch):
    def message(name: str, data: bytes | None = None) -> str:
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            read_schedule(path)
        assert "\n" not in str(caught.value) and name in str(caught.value)
        return str(caught.value)

    assert "must end with one of .csv, .txt, .json" in message("table.xlsx", b"0F0,0B0")
    assert "No such file or directory" in message("missing.csv")
    (tmp_path / "folder.csv").mkdir()
    assert "Is a directory" in message("folder.csv")
    assert "row 1, column 1: the row holds no op" in message("empty.csv", b"")
    assert "row 2, column 2: this is not text: byte 0x00" in message("nul.csv", b"0F0,0B0\n1F0,\0")
    assert "row 1, column 1: this is not text: byte 0xff" in message("binary.csv", b"\xff\xd8")
    wide = b"0F0" + b"," * formats.MOST_BYTES
    assert "more than 16,777,216" in message("large.csv", wide)
    assert "row 1025, column 1: more than 1024 rows" in message("long.csv", b"0F0,0B0\n" * 2000)
    far = b"0F0" + b"," * 70_000 + b"0B0"
    assert "row 1, column 70001 (0B0): more than 65,536 columns" in message("far.csv", far)


def test_a_file_is_named_after_itself(tmp_path):
    schedule = make("zb_h1", microbatches=3, stages=2)
    record = json.dumps({**to_dict(schedule), "name": "mine"})
    texts = {
        "mine.csv": to_csv(schedule), "mine.TXT": to_text(schedule), "mine.json": "\ufeff" + record
    }  # fmt: skip
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        again = read_schedule(path)
        assert_same_table(again, schedule)
        assert again.name == "mine"


# --- fuzz -----------------------------------------------------------------------------------------


def assert_sound_or_named(path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        schedule = read_schedule(path)
    except UserError as error:
        assert PLACE.search(str(error)) and "\n" not in str(error)
    else:
        assert schedule.ticks >= 1


def edited(draw, text: str, alphabet: str) -> str:
    """The text with a few characters replaced, removed, inserted or duplicated."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        to = min(len(text), at + draw(st.integers(0, 6)))
        put = draw(st.one_of(st.text(alphabet, max_size=4), st.just(text[at:to] * 2)))
        text = text[:at] + put + text[to:]
    return text


@FUZZ
@given(st.data())
def test_edited_files_are_sound_or_their_mistake_is_named(tmp_path, data):
    schedule = data.draw(schedules())
    suffix = data.draw(st.sampled_from(["csv", "txt", "json"]))
    orders = data.draw(st.booleans())
    text = {
        "csv": lambda: to_csv(schedule, orders=orders),
        "txt": lambda: to_text(schedule, orders=orders),
        "json": lambda: json.dumps(to_dict(schedule)),
    }[suffix]()
    alphabet = '0123456789FIBW,/.|\n ;()"{}[]:-SEND_\x00\x1c\u0663é'
    text = edited(data.draw, text, alphabet)
    assert_sound_or_named(tmp_path / f"fuzz.{suffix}", text.encode())


@FUZZ
@given(st.sampled_from(["csv", "txt", "json"]), st.binary(max_size=80))
def test_random_bytes_are_sound_or_their_mistake_is_named(tmp_path, suffix, data):
    assert_sound_or_named(tmp_path / f"fuzz.{suffix}", data)


@FUZZ
@given(st.data())
def test_random_cells_are_sound_or_their_mistake_is_named(tmp_path, data):
    """Cells that are ops, in any order, as a slip of the hand in a spreadsheet may give."""
    number = st.integers(0, 2) | st.sampled_from([7, 999_999])
    op = st.builds("{}{}{}".format, number, st.sampled_from("FIBW"), number)
    cells = st.lists(st.lists(op | st.just(""), max_size=7), min_size=1, max_size=3)
    text = "\n".join(",".join(row) for row in data.draw(cells))
    assert_sound_or_named(tmp_path / "fuzz.csv", text.encode())


def test_a_dict_that_is_none_is_refused():
    with pytest.raises(UserError) as error:
        from_dict(None)
    names(error, "object")
