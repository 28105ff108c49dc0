"""Process groups: one layout after another in the same processes, and generators that no two ranks share by accident."""

import re

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from mindspeed_kernels.device import Device, open_device
from mindspeed_parallel.layout import LayoutError, parse_layout
from mindspeed_parallel.megatron import groups as megatron_groups
from mindspeed_parallel.megatron.features import activate
from mindspeed_runtime.launch import Rank, world
from tiny_training import opened, train

pytestmark = pytest.mark.dist


def _one_layout_after_another(rank: Rank, texts):
    found = []
    device = open_device("cpu")
    with world(rank, device, 60), activate({}, device):
        for text in texts:
            with megatron_groups.open(parse_layout(text), rank.size) as groups:
                sizes = (groups.pg.tp.size(), groups.pg.pp.size(), groups.pg.dp.size())
                total = torch.tensor([float(rank.rank)])
                dist.all_reduce(total, group=groups.pg.tp)
                place = (groups.tensor_rank, groups.pipeline_rank, groups.data_rank)
                found.append((sizes, float(total), place, groups.is_first_stage, groups.is_last_stage))
            left = [
                name
                for name, value in vars(parallel_state).items()
                if isinstance(value, dist.ProcessGroup | list) and name.startswith("_") and value
            ]
            assert left == [], left
            assert get_cuda_rng_tracker().get_states() == {}
            assert rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is None
    return found


def test_the_same_processes_open_one_layout_after_another(pool):
    found = pool.run(_one_layout_after_another, ["tp2pp2sp", "dp4", "pp2dp2", "tp4"], nproc=4)
    assert [part[0] for part in found[0]] == [(2, 2, 1), (1, 1, 4), (1, 2, 2), (4, 1, 1)]
    assert [[part[1] for part in rank] for rank in found] == [
        [1.0, 0.0, 0.0, 6.0],
        [1.0, 1.0, 1.0, 6.0],
        [5.0, 2.0, 2.0, 6.0],
        [5.0, 3.0, 3.0, 6.0],
    ]
    assert [rank[0][2] for rank in found] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    assert [rank[2][2] for rank in found] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [rank[2][3:] for rank in found] == [(True, False)] * 2 + [(False, True)] * 2


def test_training_is_the_same_after_another_layout_was_open(pool):
    first = pool.run(train, "pp2vpp2", None, None, 1, nproc=2)
    pool.run(train, "tp2sp", None, None, 1, nproc=2)
    again = pool.run(train, "pp2vpp2", None, None, 1, nproc=2)
    for one, two in zip(first, again, strict=True):
        assert one.losses == two.losses
        assert all(torch.equal(one.weights[key], two.weights[key]) for key in one.weights)


def _drawn(rank: Rank, numbers):
    """What a rank draws alike with its tensor neighbours, and what it draws of its own, for each seed."""
    with opened(rank, "tp2pp2", reference=False) as groups:
        found = []
        for number in numbers:
            groups.seed(number)
            shared = torch.rand(4).tolist()
            with get_cuda_rng_tracker().fork():
                found.append((shared, torch.rand(4).tolist()))
        return found


def test_no_two_ranks_stages_or_steps_drop_the_same_elements(pool):
    numbers = list(range(40))
    found = pool.run(_drawn, numbers, nproc=4)
    for stage in (0, 1):
        left, right = found[2 * stage], found[2 * stage + 1]
        assert [shared for shared, _ in left] == [shared for shared, _ in right]
    drawn = [tuple(own) for rank in found for _, own in rank]
    drawn += [tuple(shared) for rank in found[::2] for shared, _ in rank]
    assert len(set(drawn)) == len(drawn) == 4 * 40 + 2 * 40
    assert found == pool.run(_drawn, numbers, nproc=4)


@pytest.mark.parametrize(
    ("text", "num_ranks", "message"),
    [
        ("tp2pp2", 2, "layout tp2pp2: takes 4 processes, 2 were started"),
        ("ep2", 1, "layout ep2: expert=2 does not divide the 1 ranks of a stage"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_group_is_made(text, num_ranks, message):
    with (
        pytest.raises(LayoutError, match=re.escape(message)),
        megatron_groups.open(parse_layout(text), num_ranks),
    ):
        pytest.fail("it was opened")


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_two_stages_of_several_chunks_never_exchange_in_batches(kind):
    options = megatron_groups.communication_options(parse_layout("pp2vpp2"), Device(kind=kind))
    assert not options["batch_p2p_comm"]
    assert megatron_groups.communication_options(parse_layout("pp4vpp2"), Device(kind=kind))["batch_p2p_comm"] == (
        kind != "cpu"
    )
