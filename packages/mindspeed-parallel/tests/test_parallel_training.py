"""A tiny decoder trains in every layout as it does in one process, in fp64."""

import pytest
import torch
from tiny_training import difference, train

pytestmark = pytest.mark.dist
BOUND = 1e-10


@pytest.fixture(scope="module")
def reference(pool):
    return pool.run(train, "tp1", nproc=1)


def test_training_moves_every_weight(pool, reference):
    start = pool.run(train, "tp1", None, None, 0, nproc=1)
    before, after = start[0].weights, reference[0].weights
    assert before.keys() == after.keys()
    assert [key for key in before if torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2", "pp2vpp2", "dp2", "tp2pp2sp"])
def test_a_layout_trains_like_one_process(pool, reference, layout):
    nproc = 4 if layout == "tp2pp2sp" else 2
    found = difference(pool.run(train, layout, nproc=nproc), reference)
    assert max(found.values()) < BOUND, found


def test_batched_exchange_between_two_stages_of_two_chunks_is_wrong_and_is_not_what_is_chosen(pool, reference):
    found = difference(pool.run(train, "pp2vpp2", {"batch_p2p_comm": True}, nproc=2), reference)
    assert found["loss"] > 1e-4


@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "pp2vpp2"])
def test_recomputing_layers_changes_nothing(pool, reference, layout):
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = difference(pool.run(train, layout, full, nproc=1 if layout == "tp1" else 2), reference)
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_recomputing_drops_the_same_weights_of_attention_again(pool, reference, layout):
    nproc = 2 if layout == "tp2" else 1
    dropout = {"attention_dropout": 0.3}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain = pool.run(train, layout, dropout, nproc=nproc)
    assert difference(plain, reference)["loss"] > 1e-4
    found = difference(pool.run(train, layout, {**dropout, **full}, nproc=nproc), plain)
    assert max(found.values()) < BOUND, found


@pytest.mark.parametrize(
    "fault", [{"windows": (None, 5, 3, None)}, {"windows": (None, 4, None, 3)}, {"layernorm_epsilon": 1.1e-5}]
)
def test_a_fault_in_one_layer_shows(pool, reference, fault):
    assert difference(pool.run(train, "pp2", fault, nproc=2), reference)["weights"] > 1e-7
