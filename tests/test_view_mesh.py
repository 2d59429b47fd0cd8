"""The mesh as text and as a picture."""

from __future__ import annotations

import re

import numpy as np
import pytest
from errors import names
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PatchCollection, PathCollection
from matplotlib.text import Text

from mtx.config import Layout
from mtx.errors import UserError
from mtx.plan.hardware import hardware
from mtx.view.mesh import MeshView, axis_links, draw_mesh, mesh_text
from mtx.view.mesh_picture import MeshMap


def test_one_node():
    assert mesh_text(Layout(data=2, pipe=2, tensor=2)) == (
        "pipe 2 x data 2 x tensor 2 = 8 devices on 1 node of 8\n"
        "node 0  stage 0: replica 0 [0 1]  replica 1 [2 3]\n"
        "        stage 1: replica 0 [4 5]  replica 1 [6 7]\n"
        "\n"
        "pipe    2 devices, 4 apart  inside a node: activations, once a microbatch and chunk\n"
        "data    2 devices, 2 apart  inside a node: gradients and parameters, once a step\n"
        "tensor  2 devices, 1 apart  inside a node: activations, several times a layer"
    )


def test_the_1t_model_shows_the_first_nodes_and_the_last():
    text = mesh_text(Layout(pipe=64, data=6, tensor=8))
    assert text.split("\n\n")[0] == (
        "pipe 64 x data 6 x tensor 8 = 3072 devices on 384 nodes of 8\n"
        "node 0    stage 0: replica 0 [0-7]\n"
        "node 1    stage 0: replica 1 [8-15]\n"
        "node 2    stage 0: replica 2 [16-23]\n"
        "node 3    stage 0: replica 3 [24-31]\n"
        "… 379 more nodes …\n"
        "node 383  stage 63: replica 5 [3064-3071]"
    )
    pipe, data, tensor = text.split("\n")[-3:]
    assert "64 devices, 48 apart  between nodes:" in pipe
    assert "6 devices, 8 apart    between nodes:" in data
    assert "8 devices, 1 apart    inside a node:" in tensor


def test_a_tensor_group_over_two_nodes_names_its_shards():
    text = mesh_text(Layout(pipe=2, tensor=16))
    assert "node 3  stage 1: replica 0 [24-31] shards 8-15 of 16" in text
    assert "inside and between, over 2 nodes: activations, several times a layer" in text


def test_groups_that_do_not_fit_the_nodes():
    text = mesh_text(Layout(data=3, tensor=3), node_size=4)
    assert (
        "node 1  stage 0: replica 1 [4 5] shards 1 2 of 3  replica 2 [6 7] shards 0 1 of 3" in text
    )
    assert "inside and between, over 1 to 2 nodes: activations, several times a layer" in text


def test_many_replicas_on_a_node_are_summed_up():
    assert "node 7  stage 0: replicas 56-63 [56-63]\n" in mesh_text(Layout(data=64))
    text = mesh_text(Layout(pipe=2, data=9, tensor=8), node_size=72)
    assert "node 1  stage 1: replicas 0-8 [72-143, 8 each]" in text


def test_an_axis_of_one_device_has_nothing_to_send():
    assert mesh_text(Layout()).count("1 device  nothing to send") == 3


def test_a_node_has_devices():
    with pytest.raises(UserError) as error:
        mesh_text(Layout(), node_size=0)
    names(error, "node_size=0", 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_every_listed_device_is_where_the_mesh_puts_it(pipe, data, tensor, node_size):
    """Reads the text back; groups have at most four devices, and stages at most four groups."""
    layout = Layout(pipe=pipe, data=data, tensor=tensor)
    grid = np.arange(layout.devices).reshape(pipe, data, tensor)
    node = 0
    for line in mesh_text(layout, node_size=node_size).split("\n\n")[0].split("\n")[1:]:
        if line.startswith("…"):
            continue
        head = re.match(r"(?:node (\d+))? *stage (\d+): ", line)
        node = int(head[1] or node)
        for replica, first, last in re.findall(r"replica (\d+) \[(\d+)(?:[ -](\d+))?\]", line):
            held = range(int(first), int(last or first) + 1)
            assert set(held) <= set(grid[int(head[2]), int(replica)])
            assert {rank // node_size for rank in held} == {node}


# --- picture --------------------------------------------------------------------------------------

A100 = hardware("a100-80gb")


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_few_devices_are_drawn_one_by_one():
    layout = Layout(data=2, pipe=2, tensor=2)
    figure = draw_mesh(layout, A100)
    labels = [text for text in texts(figure) if text.startswith("p") and "\n" in text]
    assert labels == [f"p{p}\nd{d}\nt{t}" for p in range(2) for d in range(2) for t in range(2)]
    (cells,) = figure.findobj(PatchCollection)
    colours = [tuple(colour) for colour in cells.get_facecolor()]
    assert len(colours) == 8 and len(set(colours[:4])) == len(set(colours[4:])) == 1
    assert colours[0] != colours[4], "stages look alike"


def test_three_thousand_devices_are_drawn_by_node():
    figure = draw_mesh(Layout(pipe=64, data=6, tensor=8), A100)
    cells, node = figure.findobj(PatchCollection)
    colours = [tuple(colour) for colour in cells.get_facecolor()]
    assert len(node.get_facecolor()) == 8 and len(colours) == 384 and len(set(colours)) == 64
    marks = {(one.get_label(), len(one.get_offsets())) for one in figure.findobj(PathCollection)}
    assert {("pipe group of device 0", 64), ("data group of device 0", 6)} <= marks
    said = texts(figure)
    assert any("a cell: 1 node, 8 devices" in text for text in said)
    assert {"p0", "p2", "p62", "node 0", "p0\nd0\nt7"} <= set(said)
    links = ["between nodes: 25 GB/s a device"] * 2 + ["inside a node: 300 GB/s a device"]
    assert [text for text in said if "GB/s" in text] == links


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 8, 35, 64]),
    st.sampled_from([1, 3, 6, 16, 100]),
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from(["a100-80gb", "gb200", "tpu-v5p"]),
)
def test_no_two_cells_lie_on_each_other_and_no_device_is_left_out(pipe, data, tensor, name):
    layout, target = Layout(pipe=pipe, data=data, tensor=tensor), hardware(name)
    grid, stage = MeshMap.of(layout, target.node_devices), data * tensor
    corners = {}
    for rank in range(layout.devices):
        corners.setdefault(grid.corner(rank), []).append(rank)
    assert len(corners) == pipe * grid.cells <= 1300
    for ranks in corners.values():
        assert len(ranks) <= grid.unit and ranks[-1] - ranks[0] == len(ranks) - 1
        assert {rank // stage for rank in ranks} == {ranks[0] // stage}, "two stages in a cell"
    if grid.aligned and grid.unit <= target.node_devices:
        nodes = [{rank // target.node_devices for rank in ranks} for ranks in corners.values()]
        assert all(len(node) == 1 for node in nodes), "a cell lies in two nodes"
    xs, ys = np.array(sorted(corners)).T
    for x, y in zip(xs, ys, strict=True):
        near = (abs(xs - x) < 0.999) & (abs(ys - y) < 0.999)
        assert near.sum() == 1


def test_links_of_every_axis():
    pipe, data, tensor = axis_links(Layout(pipe=2, data=4, tensor=4), 8)
    assert (pipe.size, pipe.stride, pipe.reach) == (2, 16, "between nodes")
    assert (data.size, data.stride, data.reach) == (4, 4, "inside and between, over 2 nodes")
    assert (tensor.size, tensor.stride, tensor.reach) == (4, 1, "inside a node")


@pytest.mark.parametrize("suffix, magic", [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_picture_is_saved_by_suffix(tmp_path, suffix, magic):
    draw_mesh(Layout(data=512, tensor=4), A100, tmp_path / f"mesh.{suffix}")
    assert (tmp_path / f"mesh.{suffix}").read_bytes().startswith(magic)


def test_a_picture_that_cannot_be_saved(tmp_path):
    with pytest.raises(UserError) as error:
        draw_mesh(Layout(), A100, tmp_path / "mesh.txt")
    names(error, "mesh.txt", ".svg", ".png", ".pdf")
    with pytest.raises(UserError) as error:
        draw_mesh(Layout(), A100, tmp_path / "no" / "mesh.svg")
    names(error, tmp_path / "no" / "mesh.svg")


def test_a_notebook_sees_the_picture_and_a_terminal_the_text():
    view = MeshView(layout=Layout(data=2, pipe=2, tensor=2), hardware=A100)
    png, metadata = view._repr_png_()
    assert png.startswith(b"\x89PNG") and metadata == {"width": 1104}
    assert str(view) == mesh_text(view.layout)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([1, 3, 8]), st.sampled_from([1, 6, 16]), st.sampled_from([1, 2, 8]))
def test_devices_that_are_drawn_alone_keep_their_tensor_group_in_a_row(pipe, data, tensor):
    layout = Layout(pipe=pipe, data=data, tensor=tensor)
    grid = MeshMap.of(layout, 8, alone=1024)
    corners = [grid.corner(rank) for rank in range(layout.devices)]
    assert grid.unit == 1 and len(set(corners)) == layout.devices
    for first in range(0, layout.devices, tensor):
        x, y = corners[first]
        group = corners[first : first + tensor]
        assert group == [(x + shard, y) for shard in range(tensor)]


def test_rows_end_where_nodes_do():
    grid = MeshMap.of(Layout(pipe=2, data=4, expert=8, tensor=2), 8, alone=1024)
    frames = grid.frames(8)
    assert len(frames) == 16 and {(wide, high) for *_, wide, high in frames} == {(8, 1)}
