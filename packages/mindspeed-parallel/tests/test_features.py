"""Features: what they change while they are on, and that nothing is left of it afterwards."""

import dataclasses
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import tiny_training  # noqa: F401  everything that training imports is there to be searched
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from mindspeed_kernels.device import Device, DeviceError
from mindspeed_parallel.megatron.features import FEATURES, activate, activation, ledger, resolve
from mindspeed_parallel.megatron.features.device import DEVICE
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.patch import MISSING, Feature, Patch, PatchError, applied, check, locate

CPU = Device(kind="cpu")
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA machine stock megatron-core works")
PAGE = Path(__file__).parents[3] / "docs" / "patches.md"


def _modules():
    return {name: found for name, found in sys.modules.items() if name.split(".")[0] in ("megatron", "torch")}


def _snapshot():
    """Every object that a module of megatron or torch, or a class of theirs, binds."""
    seen = {}
    for name, module in _modules().items():
        for key, value in list(vars(module).items()):
            seen[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                seen.update({(name, key, inner): bound for inner, bound in vars(value).items()})
    return seen


def _holders(patches):
    """Modules that still bind what a patch has replaced. Where PyTorch keeps its own is not asked."""
    originals = {id(original): patch for patch, original in patches if original is not MISSING}
    return sorted(
        f"{name}.{key}: {originals[id(value)].target}"
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and not name.startswith(("torch.cuda.", "test_", "_pytest"))
        for key, value in list(vars(module).items())
        if id(value) in originals
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_patch_fits_what_is_installed_and_no_module_keeps_the_original(feature):
    patches = ledger.patches_of(feature)
    check(patches)
    assert all(p.written_against for p in patches if p.target.startswith("megatron.") and p.kind != "define")
    before = [(patch, locate(patch.target)[2]) for patch in patches]
    with applied(patches):
        assert _holders(before) == []


def test_a_binding_that_a_patch_forgets_is_found():
    (whole,) = [patch for patch in ledger.patches_of(DEVICE) if patch.target.endswith(":maybe_move_tensor_to_cpu")]
    before = [(whole, locate(whole.target)[2])]
    with applied([dataclasses.replace(whole, also=())]):
        assert [line.split(":")[0] for line in _holders(before)] == [
            "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu"
        ]


def test_a_changed_upstream_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(moe_utils, "maybe_move_tensor_to_cpu", lambda tensor, as_numpy=False: tensor)
    with pytest.raises(PatchError, match="maybe_move_tensor_to_cpu: its source changed"), activate({}, CPU):
        pytest.fail("a patch for another source was applied")


def test_torch_and_megatron_are_the_same_objects_afterwards():
    before = _snapshot()
    with activate({"torch_adam": {}}, CPU) as patches:
        assert len(patches) == sum(len(ledger.patches_of(feature)) for feature in FEATURES)
        assert len([key for key, value in _snapshot().items() if before.get(key) is not value]) >= len(patches)
    after = _snapshot()
    assert [key for key, value in before.items() if after[key] is not value] == []
    assert {key for key in after if key[0] == "torch.cuda"} == {key for key in before if key[0] == "torch.cuda"}


def test_the_page_of_patches_is_current():
    assert PAGE.read_text() == ledger.page(), "write it anew: see the head of docs/patches.md"


def test_a_stale_page_fails_the_check_and_says_how_to_write_it(tmp_path, capsys):
    page = tmp_path / "patches.md"
    assert ledger.main([str(page), "--check"]) == 1
    assert ledger.main([str(page)]) == 0
    assert ledger.main([str(page), "--check"]) == 0
    page.write_text(page.read_text() + "x")
    assert ledger.main([str(page), "--check"]) == 1
    assert "stale; write it anew with `python -m" in capsys.readouterr().err


LITERALS = """
import torch

class Names(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Names.seen.append(torch.zeros(1, device="cuda").device.type)
        return 2 * grad

WAYS = [
    lambda x: x.cuda(),
    lambda x: x.to("cuda:0"),
    lambda x: x.to(torch.device("cuda")),
    lambda x: x.to(device="cuda"),
    lambda x: x.to("cuda", torch.float64),
    lambda x: torch.ones(1, device="cuda"),
    lambda x: torch.nn.Linear(2, 2).cuda().weight,
    lambda x: torch.nn.Linear(2, 2, device="cuda").weight,
]
"""


def _written_in(module):
    """The names of LITERALS, as code of ``module``."""
    names = {"__name__": module}
    exec(compile(LITERALS, f"{module}.py", "exec"), names)
    return types.SimpleNamespace(**names)


def test_cuda_literals_of_megatron_mean_the_chosen_device_inside_and_in_backward_passes():
    megatron = _written_in("megatron.core.example")
    with activate({}, CPU):
        x = torch.ones(3, requires_grad=True)
        assert [way(x).device.type for way in megatron.WAYS] == ["cpu"] * len(megatron.WAYS)
        assert megatron.WAYS[4](x).dtype == torch.float64
        assert torch.nn.Linear(2, 2).weight.type() == "torch.cuda.FloatTensor"
        megatron.Names.apply(x).sum().backward()
        assert isinstance(torch.cuda.Stream, type) and (torch.cuda.Stream | None)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        assert torch.cuda.current_device() == torch.device("cpu")
    assert megatron.Names.seen == ["cpu"]
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_cuda_literals_of_other_code_are_refused():
    other = _written_in("mindspeed_train.example")
    with activate({}, CPU):
        x = torch.ones(3, requires_grad=True)
        for way in other.WAYS:
            with pytest.raises(DeviceError, match=r"mindspeed_train.example.py:\d+: names the device \"cuda\""):
                way(x)
        with pytest.raises(DeviceError, match=r"example.py:13: "):
            other.Names.apply(x).sum().backward()


@NO_CUDA
def test_stock_torch_refuses_those_literals_here():
    for ask in (lambda: torch.ones(1).cuda(), lambda: torch.ones(1, device="cuda"), torch.cuda.current_device):
        with pytest.raises((RuntimeError, AssertionError)):
            ask()


def test_the_generator_tracker_forks_and_returns():
    with activate({}, CPU):
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 11)
        torch.manual_seed(5)
        outside = torch.rand(3)
        torch.manual_seed(5)
        with tracker.fork("a"):
            first = torch.rand(4)
        assert torch.equal(torch.rand(3), outside)
        with tracker.fork("a"):
            second = torch.rand(4)
    expected = torch.Generator().manual_seed(11)
    assert torch.equal(torch.cat((first, second)), torch.rand(8, generator=expected))


@NO_CUDA
def test_stock_megatron_cannot_fork_a_generator_here():
    with pytest.raises((RuntimeError, AssertionError)):
        CudaRNGStatesTracker().add("a", 11)


def test_expert_split_sizes_leave_the_device_as_numbers():
    sizes = torch.tensor([3, 0, 5])
    assert isinstance(token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True), torch.Tensor)  # stock
    with activate({}, CPU):
        assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 0, 5]
        assert token_dispatcher.maybe_move_tensor_to_cpu(sizes, record_stream=True).equal(sizes)
        assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_what_is_on_follows_from_the_device_and_what_was_asked():
    assert [feature.name for feature, _ in resolve({}, CPU)] == ["device"]
    assert [feature.name for feature, _ in resolve({}, Device(kind="cuda"))] == []
    asked = resolve({"torch_adam": {}}, Device(kind="cuda"))
    assert [feature.name for feature, _ in asked] == ["torch_adam"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    depth: int = 3


def _refuse_deep(context):
    if context.options.depth > 4:
        raise ConfigError(f"features.extra.depth={context.options.depth}: at most 4")


def _extra(**changes):
    fields = {
        "name": "extra",
        "why": "",
        "resort": "",
        "options": _Options,
        "check": _refuse_deep,
        "patches": lambda context: [
            Patch(target="json:depth", make=lambda _: context.options.depth, kind="define", why="")
        ],
    }
    return Feature(**{**fields, **changes})


def _plug(monkeypatch, feature):
    monkeypatch.setitem(sys.modules, "extra_feature", types.SimpleNamespace(EXTRA=feature))
    point = EntryPoint(name="extra", value="extra_feature:EXTRA", group="mindspeed.features")
    monkeypatch.setattr(activation, "entry_points", lambda group: [point] if group == point.group else [])


@pytest.mark.parametrize(
    ("asked", "changes", "text"),
    [
        ({"devise": {}}, {}, r"features.devise: no such feature; did you mean device\?"),
        ({"device": {"kind": "cpu"}}, {}, r"features.device.kind: no such option; there are: none"),
        ({"extra": {"depht": 4}}, {}, r"features.extra.depht: no such option; did you mean depth\?"),
        ({"extra": {"depth": "4"}}, {}, r"features.extra.depth: .*got '4'"),
        ({"extra": {"depth": 5}}, {}, r"features.extra.depth=5: at most 4"),
        ({"extra": {}}, {"requires": ("torch_adam",)}, r"features.extra: needs torch_adam; switch it on too"),
        ({"extra": {}}, {"excludes": ("device",)}, r"features.extra: cannot stand with device"),
        ({}, {"name": "device"}, r"feature device: extra_feature:EXTRA brings a second one"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(monkeypatch, asked, changes, text):
    _plug(monkeypatch, _extra(**changes))
    with pytest.raises(ConfigError, match=text), activate(asked, CPU):
        pytest.fail("it was switched on")


def test_a_feature_of_another_distribution_is_switched_on_with_its_options(monkeypatch):
    import json

    _plug(monkeypatch, _extra())
    assert [feature.name for feature, _ in resolve({}, CPU)][-1] != "extra"
    with activate({"extra": {"depth": 4}}, CPU):
        assert json.depth == 4
    assert not hasattr(json, "depth")
