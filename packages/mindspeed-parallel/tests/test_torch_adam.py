"""megatron-core's optimizer checkpoints with PyTorch's Adam: right with the feature, refused or wrong without."""

import contextlib
import copy

import pytest
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from mindspeed_kernels.device import Device
from mindspeed_kernels.reference import fp64
from mindspeed_parallel.layout import parse_layout
from mindspeed_parallel.megatron import groups as megatron_groups
from mindspeed_parallel.megatron.features import activate
from mindspeed_parallel.megatron.features.ledger import patches_of
from mindspeed_parallel.megatron.features.torch_adam import TORCH_ADAM
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.launch import Rank, world
from mindspeed_runtime.patch import applied
from tiny_training import batches, chunks_for, config_for, gradients_of, optimizer_for, shards, wrapped_for

CPU = Device(kind="cpu")
FIRST, LAST = range(2), range(2, 4)  # steps before the checkpoint and after it


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    rank = Rank(rank=0, size=1, local_rank=0, rendezvous=f"file://{tmp_path_factory.mktemp('meet')}/store")
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(rank, CPU, 30))
        stack.enter_context(fp64())
        stack.enter_context(activate({}, CPU))
        yield stack.enter_context(megatron_groups.open(parse_layout("tp1"), 1))


class _Training:
    """A model with its optimizer, in this process alone."""

    def __init__(self, groups):
        config = config_for(groups)
        self.groups = groups
        self.chunks = chunks_for(groups, config)
        self.wrapped = wrapped_for(self.chunks, groups, config)
        self.optimizer = optimizer_for(self.wrapped)

    def train(self, steps):
        for step in steps:
            gradients_of(self.wrapped, self.groups, batches(step))
            self.optimizer.step()

    def weights(self):
        return {(key, offset): data.clone() for key, offset, _, data in shards(self.chunks, self.groups)}

    def state(self, is_loading):
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": self.groups.pg.dp_cp}
        model = self.chunks[0].sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def load(self, checkpoint):
        assert _keys(self.state(is_loading=True)) == _keys(checkpoint)
        loaded = _plain(checkpoint)
        self.chunks[0].load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def _keys(tree):
    """Names and shapes of all tensors of a checkpoint."""
    if isinstance(tree, dict | list):
        inner = tree.values() if isinstance(tree, dict) else tree
        return sorted(found for item in inner for found in _keys(item))
    return [(tree.key, tuple(tree.data.shape))] if isinstance(tree, ShardedTensor | ShardedTensorFactory) else []


def _plain(tree):
    """What reading a checkpoint of one process gives. megatron-core's own writer forks, which is not safe in tests."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    if isinstance(tree, LocalNonpersistentObject):
        return tree.unwrap()
    return copy.deepcopy(tree.data if isinstance(tree, ShardedTensor | ShardedObject | ShardedTensorFactory) else tree)


@pytest.fixture(scope="module")
def saved(groups):
    """A checkpoint, and the weights of the run that went on from it."""
    training = _Training(groups)
    training.train(FIRST)
    checkpoint = copy.deepcopy(training.state(is_loading=False))
    training.train(LAST)
    return checkpoint, training.weights()


def _resumed(groups, checkpoint, patches):
    training = _Training(groups)
    with applied(patches):
        training.load(checkpoint)
    training.train(LAST)
    return training.weights()


def _difference(found, expected):
    return max(float((found[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected)


def test_a_fresh_optimizer_resumes_as_the_run_that_went_on(groups, saved):
    checkpoint, expected = saved
    assert _difference(_resumed(groups, checkpoint, patches_of(TORCH_ADAM)), expected) < 1e-12


def _without(name):
    kept = [patch for patch in patches_of(TORCH_ADAM) if not patch.target.endswith(name)]
    assert len(kept) == 2
    return kept


def test_stock_megatron_refuses_a_fresh_optimizer(groups, saved):
    with pytest.raises(AssertionError):
        _resumed(groups, saved[0], _without(".state_dict"))


def test_stock_megatron_looks_for_the_counter_among_the_loaded_tensors(groups, saved):
    with pytest.raises(KeyError, match="step"):
        _resumed(groups, saved[0], _without("._set_main_param_and_optimizer_states"))


def test_stock_megatron_resumes_with_one_counter_for_all_without_an_error(groups, saved):
    checkpoint, expected = saved
    assert _difference(_resumed(groups, checkpoint, _without(".load_state_dict")), expected) > 1e-5


def test_it_is_refused_where_another_adam_is_installed(monkeypatch, tmp_path):
    (tmp_path / "apex.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pytest.raises(ConfigError, match=r"features\.torch_adam: apex is installed"),
        activate({"torch_adam": {}}, CPU),
    ):
        pytest.fail("it was switched on")
