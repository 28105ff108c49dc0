"""The n-th row of a run: each epoch a whole permutation, any place found at once, nothing but seed and n."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspeed_runtime.data.order import Order, permutation, permuted

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**63)
BASELINE = json.loads((Path(__file__).parent / "baselines" / "order.json").read_text())


@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_row_once(size, seed, epoch):
    order = Order(num_rows=size, seed=seed)
    assert sorted(order[epoch * size + n] for n in range(size)) == list(range(size))


@given(size=st.integers(1, 10**12), seed=seeds, n=st.integers(0, 10**15))
@settings(max_examples=60, deadline=None)
def test_any_place_is_found_alone_and_inside(size, seed, n):
    row = Order(num_rows=size, seed=seed)[n]
    assert 0 <= row < size
    assert row == Order(num_rows=size, seed=seed).at(n // size, n % size)


@given(size=sizes, seed=seeds, epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_an_epoch_at_once_is_its_places_one_by_one(size, seed, epoch):
    expected = [permuted(n, size, seed, epoch) for n in range(size)]
    assert permutation(size, seed, epoch).tolist() == expected
    assert Order(num_rows=size, seed=seed).epoch(epoch).tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_rows_are_about_equally_frequent(size):
    kinds = math.factorial(size)
    draws = 50 * kinds
    limit = 1 + 4 * math.sqrt(2 / (kinds - 1))  # four standard deviations
    counts = Counter(tuple(permuted(n, size, 1, epoch) for n in range(size)) for epoch in range(draws))
    assert _unevenness(counts, kinds, draws) < limit
    # An order that only ever rotates is far off. Of two rows there is no other.
    rotations = Counter(tuple(np.roll(range(size), epoch).tolist()) for epoch in range(draws))
    assert size == 2 or _unevenness(rotations, kinds, draws) > 5 * limit


def _unevenness(counts, kinds, draws):
    """Chi squared by degree of freedom: about 1 for fair draws."""
    expected = draws / kinds
    absent = (kinds - len(counts)) * expected
    return (sum((n - expected) ** 2 / expected for n in counts.values()) + absent) / (kinds - 1)


def test_neighbours_seeds_and_epochs_have_nothing_to_do_with_one_another():
    size = 20011
    first = permutation(size, 1, 0)
    others = (np.arange(size), np.roll(first, 1), permutation(size, 2, 0), permutation(size, 1, 1))
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / math.sqrt(size)
    assert abs(np.corrcoef(first, first + 1)[0, 1]) > 0.99


def test_without_shuffling_rows_come_as_they_stand():
    order = Order(num_rows=5, seed=1, shuffle=False)
    assert [order[n] for n in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert order.epoch(3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("case", BASELINE["cases"], ids=lambda case: f"{case['rows']} rows")
def test_the_order_is_the_one_that_runs_in_progress_rely_on(case):
    order = Order(num_rows=case["rows"], seed=case["seed"])
    assert [order[n] for n in case["n"]] == case["row"]
