"""The mesh as text."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.config import Layout
from mtx.errors import UserError
from mtx.view.mesh import mesh_text


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
    with pytest.raises(UserError, match="node_size=0 must be at least 1"):
        mesh_text(Layout(), node_size=0)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))
def test_every_listed_device_is_where_the_mesh_puts_it(pipe, data, tensor, node_size):
    """Read the text back: groups of at most four devices, of which no stage has more than four."""
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
