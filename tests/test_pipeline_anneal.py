"""Orders by simulated annealing: timing a sequence from its first change gives the same cost as
timing it from its beginning."""

import math
from random import Random

import pytest

from mtx.pipeline.anneal import Streams


def drawn(random: Random) -> Streams:
    """22 matmuls, collectives and passes, each of which waits for a few of those before it."""
    kinds = [random.choice(("matmul", "loose", "link", "link", "move")) for _ in range(22)]
    return Streams(
        [random.choice((0.0, 1e-6, 2e-5, 5e-5, 1e-4)) for _ in kinds],
        [
            frozenset(random.sample(range(number), random.randint(0, min(number, 2))))
            for number in range(len(kinds))
        ],
        links=frozenset(n for n, kind in enumerate(kinds) if kind == "link"),
        moves=frozenset(n for n, kind in enumerate(kinds) if kind == "move"),
        loose=frozenset(n for n, kind in enumerate(kinds) if kind == "loose"),
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_is_timed_again_is_what_changes(seed):
    random = Random(seed)
    streams = drawn(random)
    now, changed = streams.timed(tuple(range(22))), 0
    for _ in range(150):
        if (moved := streams._moved(now.sequence, random)) is None:
            continue
        sequence, place = moved
        assert sequence[:place] == now.sequence[:place] and sorted(sequence) == [*range(22)]
        whole = streams.timed(sequence)
        assert streams._timed(sequence, place, now, math.inf) == whole
        assert streams._timed(sequence, place, now, whole.cost_s) is None
        assert streams._timed(sequence, place, now, math.nextafter(whole.cost_s, 1.0)) == whole
        now, changed = whole, changed + 1
    assert changed > 50


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_costs_no_more_than_the_first_and_breaks_no_rule(seed):
    streams = drawn(Random(seed))
    found = streams.order(range(22))
    assert found == streams.timed(found.sequence)
    assert found.cost_s <= streams.timed(tuple(range(22))).cost_s
    for at, number in enumerate(found.sequence):
        assert streams.before[number] <= {*found.sequence[:at]}
