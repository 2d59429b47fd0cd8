"""Each known mistake is caught, by the walker or by a run; the step without mistakes passes."""

import pytest

from mtx.certify.cases import Case
from mtx.certify.compare import compare
from mtx.certify.mutants import MUTANTS, try_mutant
from mtx.certify.said import mutant_lines, mutant_numbers
from mtx.certify.step import walk_run

BY_RUN = {  # constant factors, orders, stages: no equation changes its kind
    "loss scaled", "labels after cutting", "second loss scaled",
    "labels of a part", "plain order", "shards backwards", "mean of sums",
    "head of the first stage", "encoder of own stage", "experts scaled", "tokens dropped",
}  # fmt: skip
# A run with experts takes as long as six others: `mtx certify --mutants` includes these as well.
BY_LONG_RUN = {
    "norm without experts", "norm, experts as replicas", "auxiliary loss scaled", "tokens exchanged"
}  # fmt: skip
TRIED = [mutant for mutant in MUTANTS if mutant.name not in BY_LONG_RUN]


@pytest.mark.parametrize("mutant", TRIED, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(mutant):
    tried = try_mutant(mutant)
    assert tried.by == ("run" if mutant.name in BY_RUN else "walker"), tried.said
    assert tried.said
    walker, runs = int(tried.by == "walker"), int(tried.by == "run")
    last = mutant_lines([tried], width=80)[-1]
    assert last == f"1 mutants: {walker} caught by the walker, {runs} by runs"
    assert mutant_numbers([tried])["holds"]


def test_without_its_mistake_the_step_passes():
    for run in {id(mutant.run): mutant.run for mutant in MUTANTS}.values():
        assert not walk_run(run).findings


def test_an_encoder_and_a_decoder_on_two_stages_are_those_of_one_device():
    (run,) = [mutant.run for mutant in MUTANTS if mutant.name == "encoder of own stage"]
    found = compare(Case(number=0, run=run))
    assert found.holds and found.differences, found.said
