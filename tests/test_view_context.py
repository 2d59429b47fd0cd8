"""Pictures of split sequences show what attention computes."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from mtx.config import Layout
from mtx.plan.plan import make_plan
from mtx.presets import preset
from mtx.sharding.sequence import zigzag
from mtx.view.context import Cut, draw_context
from mtx.view.mesh import mesh_text
from mtx.view.plan import draw_plan

LLAMA = replace(preset("llama-3-8b").model, sequence=1048576)


@pytest.mark.parametrize("window", [None, 3, 5, 9])
@pytest.mark.parametrize("devices", [2, 4])
def test_chunks_are_seen_as_their_positions_are(devices, window):
    cut = Cut(sequence=32, devices=devices, shards=1, by_heads=1, way="ring", causal=True,
              window=window)  # fmt: skip
    place = np.arange(32)
    back = place[:, None] - place
    mask = (back >= 0) & (back < (window or 32))
    size, order = 32 // (2 * devices), zigzag(32, devices)
    of = mask[order][:, order].reshape(devices, 2, size, devices, 2, size)
    share = of.mean(axis=(2, 5))  # [device, chunk, device, chunk]
    for device, step in np.ndindex(devices, devices):
        there = share[device, :, (device - step) % devices]
        np.testing.assert_array_equal(cut.seen()[device, step], np.ceil(there) + (there == 1))
    met = np.isfinite(cut.steps())
    in_order = mask.reshape(2 * devices, size, 2 * devices, size).any(axis=(1, 3))
    np.testing.assert_array_equal(met, in_order)


@pytest.mark.parametrize("layout", [
    Layout(context=4, tensor=2), Layout(context=64, context_attention="ring"),
    Layout(context=32, context_attention="usp"),
])  # fmt: skip
def test_the_picture_can_be_read(layout, tmp_path):
    figure = draw_context(layout, LLAMA, tmp_path / "context.png")
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) >= 5.5
    said = "\n".join(text.get_text() for text in texts)
    assert "Who holds which positions" in said and "The square of scores" in said
    assert ("shards of sequence parallelism, 2 a device" in said) == (layout.tensor == 2)
    assert ("8 neighbours share" in said) == (layout.context_attention == "usp")
    pixels = imread(tmp_path / "context.png")
    assert (pixels[:3] == 1).all() and (pixels[:, -3:] == 1).all()


def test_a_plan_s_picture_has_it():
    run = preset("miniature")
    figure = draw_plan(make_plan(replace(run, layout=replace(run.layout, context=2))))
    said = "\n".join(text.get_text() for text in figure.findobj(Text))
    assert "pipe 2 x data 2 x context 2 x tensor 2 = 16" in said and "p1 d0\nc1 t0" in said
    assert "context 2, attention by ulysses" in said


def test_a_mesh_says_whose_parts_are_where():
    text = mesh_text(Layout(data=2, context=4, tensor=2))
    assert "node 1  stage 0: replica 1 part 0 [8 9]  replica 1 part 1 [10 11]" in text
    assert "context  4 devices, 2 apart  inside a node: keys and values" in text
