"""The account of a conversion catches what the rules and the writers would let pass."""

import pytest
import torch
from mindspeed_models.errors import WeightError
from mindspeed_models.testing import save_tiny
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.ledger import Ledger, Totals
from mindspeed_models.weights.rule import Rule
from mindspeed_models.weights.source import open_source
from mindspeed_runtime.rundir import read_manifest


def _ledger():
    return Ledger({"a": (6, 3), "b": (6, 3)}, {"t": (12, 3)})


def test_a_complete_account_is_closed_with_its_totals():
    ledger = _ledger()
    for name in "ab":
        for row in (4, 0, 2):
            ledger.used(name, row, (2, 3))
    ledger.written("t", 0, (12, 3))
    assert ledger.close() == Totals(sources=2, targets=1, elements=36)


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([(0, 4)], "b: rows 4 to 6 were never used"),
        ([(2, 6)], "b: rows 0 to 2 were never used"),
        ([(0, 2), (3, 6)], "b: rows 2 to 3 were never used"),
        ([(0, 4), (2, 6)], "b: rows 2 to 4 were twice used"),
        ([(0, 6), (0, 6)], "b: rows 0 to 6 were twice used"),
        ([], "b: rows 0 to 6 were never used"),
    ],
)
def test_a_source_that_is_not_used_exactly_once_is_named(spans, text):
    ledger = _ledger()
    ledger.used("a", 0, (6, 3))
    for start, stop in spans:
        ledger.used("b", start, (stop - start, 3))
    ledger.written("t", 0, (12, 3))
    with pytest.raises(WeightError, match=text):
        ledger.close()


def test_a_target_that_is_not_written_exactly_once_is_named():
    ledger = _ledger()
    for name in "ab":
        ledger.used(name, 0, (6, 3))
    with pytest.raises(WeightError, match="t: rows 0 to 12 were never written"):
        ledger.close()
    ledger.written("t", 0, (12, 3))
    ledger.written("t", 0, (12, 3))
    with pytest.raises(WeightError, match="t: rows 0 to 12 were twice written"):
        ledger.close()


def test_what_is_no_part_of_the_conversion_is_named():
    with pytest.raises(WeightError, match="c: was used, and is no part"):
        _ledger().used("c", 0, (1, 3))
    with pytest.raises(WeightError, match=r"a: a part of shape \(6, 2\) was used of \(6, 3\)"):
        _ledger().used("a", 0, (6, 2))


def test_elements_that_are_lost_on_the_way_are_counted():
    ledger = Ledger({"a": (6,)}, {"t": (5,)})
    ledger.used("a", 0, (6,))
    ledger.written("t", 0, (5,))
    with pytest.raises(WeightError, match="6 elements were used and 5 written"):
        ledger.close()


def test_a_manifest_carries_the_totals(tmp_path):
    model = save_tiny("qwen3", tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    facts = read_manifest(tmp_path / "ck").facts
    assert facts["elements"] == facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["sources"] == len(model.state_dict())
    assert facts["targets"] == len(open_source(tmp_path / "ck").rules)


def _value_from_the_key(self, first, last):
    """A planted fault: the value's rows are read from the key, which has as many."""
    for item in _TRUE_WITHIN(self, first, last):
        yield type(item)(source=1, start=item.start, stop=item.stop) if item.source == 2 else item


_TRUE_WITHIN = Rule._within


def test_a_fault_in_packing_that_keeps_every_shape_stops_the_conversion(tmp_path, monkeypatch):
    save_tiny("qwen2", tmp_path / "hf")
    monkeypatch.setattr(Rule, "_within", _value_from_the_key)
    with pytest.raises(WeightError, match=r"layers.0.self_attn.k_proj.weight: rows 0 to 16 were twice used"):
        to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_tensor_that_is_forgotten_on_the_way_back_stops_the_conversion(tmp_path, monkeypatch):
    save_tiny("qwen2", tmp_path / "hf")
    to_megatron(open_source(tmp_path / "hf"), tmp_path / "ck")
    true_unpack = Rule.unpack

    def twice_the_first(self, whole):
        found = true_unpack(self, whole)
        return [found[0], *found[:-1]] if len(found) > 1 else found

    monkeypatch.setattr(Rule, "unpack", twice_the_first)
    with pytest.raises(WeightError, match="planned as"):  # q's shape is not k's
        to_hf(open_source(tmp_path / "ck"), tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "hf"]


def test_packing_reads_no_more_than_a_box_needs():
    read = []

    def watching(name, part):
        read.append((name, part))
        return torch.zeros([one.stop - one.start for one in part])

    from mindspeed_models.families import describe
    from mindspeed_models.testing import tiny_config
    from mindspeed_models.weights.rule import expanded

    family, arch = describe(tiny_config("llama-6q3kv").to_dict())
    rules = expanded(family.rules(arch), arch.num_layers)
    rule = rules["decoder.layers.1.self_attention.linear_qkv.weight"]
    rule.pack(watching, (64, 0), (64, 96))  # what the second of three tensor ranks holds
    assert read == [
        ("model.layers.1.self_attn.q_proj.weight", (slice(32, 64), slice(0, 96))),
        ("model.layers.1.self_attn.k_proj.weight", (slice(16, 32), slice(0, 96))),
        ("model.layers.1.self_attn.v_proj.weight", (slice(16, 32), slice(0, 96))),
    ]
    read.clear()
    rules["decoder.layers.0.mlp.linear_fc2.weight"].pack(watching, (0, 48), (96, 48))
    assert read == [("model.layers.0.mlp.down_proj.weight", (slice(0, 96), slice(48, 96)))]
