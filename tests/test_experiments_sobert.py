"""SOBert's recipe: costs, and posts as text. `mtx data` and `mtx train` have their own tests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from errors import names

from mtx.errors import UserError

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
POSTS = """<?xml version="1.0" encoding="utf-8"?>
<posts>
  <row Id="1" Title="Sort?"
    Body="&lt;p&gt;I have &lt;code&gt;a &amp;lt; b&lt;/code&gt;.&lt;/p&gt;" />
  <row Id="2" Body="&lt;p&gt;Use sorted.&lt;/p&gt;" />
</posts>
"""


@pytest.fixture(scope="module")
def sobert():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        return importlib.import_module("sobert")


def test_a_dump_becomes_lines_of_text(sobert, tmp_path):
    (tmp_path / "Posts.xml").write_text(POSTS)
    path = sobert.write_posts([str(tmp_path / "Posts.xml")], tmp_path / "posts.jsonl")
    lines = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    assert lines == ["Sort?\nI have a < b.", "Use sorted."]
    (tmp_path / "Posts.xml").write_text(POSTS[:-30])
    with pytest.raises(UserError) as error:
        list(sobert.read_dump(str(tmp_path / "Posts.xml")))
    names(error, "Posts.xml", "Stack Exchange")


def test_both_models_cost_the_same_an_hour_by_the_papers_dollars(sobert, capsys):
    sobert.print_costs("a100-80gb")
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "SOBert" in line]
    assert [row[-2] for row in rows] == ["$187", "$800"]
    base, large = (float(row[-1]) for row in rows)
    assert base == pytest.approx(large, rel=0.1), "the ratio of the paper's costs is ours"
