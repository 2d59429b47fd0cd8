"""The first page of a plan."""

import dataclasses

import pytest

from mtx.errors import UserError
from mtx.plan.summary import plan_lines, plan_rows
from mtx.presets import NAMES, preset


def page(run, **options):
    return {row.name: (row.value, row.source) for row in plan_rows(run, **options)}


def test_the_page_of_the_trillion_parameter_run():
    facts = page(preset("gpt-1t"))
    assert facts["data x pipe x tensor"] == ("6 x 64 x 8 = 3,072 devices", "given")
    assert facts["nodes"] == ("384; tensor groups inside a node", "computed")
    assert facts["microbatches"] == ("m = 512 a replica, of b = 1", "computed")
    assert facts["parameters, exactly"] == ("1,008,038,758,400", "computed")
    assert facts["by the paper's equation (2)"] == ("1,008,038,707,200", "computed")
    assert facts["in the paper's table 1"] == ("1,008.0 billion", "published")
    assert facts["bubble"][0].startswith("12.3% of ideal time")
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


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_a_page_that_fits_a_terminal(name):
    for width in (80, 100):
        lines = plan_lines(preset(name), width=width)
        assert max(len(line) for line in lines) <= width
        assert len(lines) > 30


def test_published_rows_only_for_runs_of_the_paper():
    sources = {row.source for row in plan_rows(preset("miniature"))}
    assert sources == {"given", "computed", "predicted"}
    run = preset("gpt-1t")
    other = dataclasses.replace(run, global_batch=6)
    assert not {row.source for row in plan_rows(other)} & {"published", "computed from published"}


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
    with pytest.raises(UserError, match="unknown hardware 'a100'"):
        plan_rows(preset("miniature"), target="a100")
