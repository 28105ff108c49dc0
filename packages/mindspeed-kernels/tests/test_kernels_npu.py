"""The npu implementations against the definitions, over the real schemas of torch_npu's operators.

PyTorch checks every call against the schema, so a keyword, its type or its default cannot be wrong unnoticed. What the
operators compute here is what their documentation says: it proves that the calls mean what the definitions mean, and
nothing about the numerics of an NPU.
"""

import importlib.util
import sys
import types
from functools import partial

import pytest
import torch
from mindspeed_kernels.bundle import OPERATORS, Kernels, OpError
from mindspeed_kernels.device import Device
from mindspeed_kernels.ops.attention import attention
from mindspeed_kernels.ops.grouped import grouped_linear
from mindspeed_kernels.ops.norm import rms_norm
from mindspeed_kernels.ops.rotary import rotary
from mindspeed_kernels.reference import fp64
from torch.nn import functional

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="the real torch_npu defines these operators itself"
)
NPU = Device(kind="npu")
BY_DEFINITION = ("capped_attention", "causal_conv", "clamped_swiglu", "geglu", "routing", "sink_attention")
CHUNKED = ("gated_delta_rule", "selective_scan")
DOCUMENTS = torch.tensor([[1] * 5 + [2] * 6 + [0] * 2, [1] * 13])
SCHEMAS = (  # of torch_npu 2.13.0, read from its dispatcher
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    'npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor',
    (
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
        "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]"
    ),
    (
        "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
        "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
        "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
)


def _npu_rms_norm(x, gamma, epsilon=1e-6):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * scale * gamma, scale


def _npu_swiglu(x, dim=-1):
    first, second = x.chunk(2, dim)
    return first * torch.sigmoid(first) * second


def _npu_rotary_mul(x, r1, r2, rotary_mode="half", rotate=None):
    assert r1.dim() == r2.dim() == 4 and r1.shape[-1] == x.shape[-1] and rotary_mode == "half" and rotate is None
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat((-second, first), -1) * r2


def _npu_grouped_matmul(x, weight, *, group_list, split_item, group_type, group_list_type, **_: object):
    assert len(x) == len(weight) == 1 and split_item == 3 and group_list_type == 1 and group_list.dtype == torch.int64
    sizes, (x,), (weight,) = group_list.tolist(), x, weight
    with torch.no_grad():  # as on an NPU: no gradient comes back
        if group_type == 0:
            assert sum(sizes) == len(x)
            return [torch.cat([part @ own for part, own in zip(x.split(sizes), weight, strict=True)])]
        assert group_type == 2
        return [torch.stack([a @ b for a, b in zip(x.split(sizes, 1), weight.split(sizes), strict=True)])]


def _npu_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, *_: object, **__: object,
):  # fmt: skip
    assert (
        query.shape[-1] == value.shape[-1]
        and input_layout == "BSND"
        and head_num == query.shape[2]
        and 0 < keep_prob <= 1
    )
    assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    length = query.shape[1]
    hidden = torch.zeros(length, length, dtype=torch.bool)  # without a mask, nothing is hidden in any mode
    if atten_mask is not None and sparse_mode in (0, 1):
        assert atten_mask.shape[-2:] == (length, length) and atten_mask.dim() in (2, 4)
        hidden = atten_mask  # True is hidden
    elif atten_mask is not None:
        assert sparse_mode == 3 and torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        hidden = atten_mask[:length, :length]
    groups = head_num // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)) * scale
    weights = functional.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1), 1 - keep_prob)
    out = (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2)
    return out, out, out, out, 0, 0, 0


@pytest.fixture(scope="module")
def library():
    found = torch.library.Library("npu", "DEF")
    for schema in SCHEMAS:
        name = schema.split("(")[0]
        found.define(schema)
        found.impl(name, globals()[f"_{name}"], "CompositeImplicitAutograd")
    yield found
    found._destroy()


@pytest.fixture
def kernels(library, monkeypatch):
    """The bundle that an NPU would get."""
    shim = types.ModuleType("torch_npu")
    shim.__getattr__ = lambda name: getattr(torch.ops.npu, name)
    monkeypatch.setitem(sys.modules, "torch_npu", shim)
    for name in ("norm", "activation", "rotary", "attention", "grouped"):
        monkeypatch.delitem(sys.modules, f"mindspeed_kernels.npu.{name}", raising=False)
    return Kernels.for_device(NPU)


def _same(ours, reference, inputs):
    """Values and gradients of both, from the same inputs."""
    found = []
    for function in (ours, reference):
        given = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*given)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append((out.detach(), *torch.autograd.grad((out * weights).sum(), given)))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))


def _random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float64)


def test_auto_takes_the_npu_implementation_of_every_operator_that_has_one(kernels):
    expected = dict.fromkeys(OPERATORS, "npu") | dict.fromkeys(BY_DEFINITION, "reference")
    assert kernels.chosen == expected | dict.fromkeys(CHUNKED, "chunked")


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 8, 0), (8, 0, 0), (0, 0, 0)])
def test_grouped_products_mean_on_an_npu_what_they_mean_by_definition(kernels, counts):
    inputs, counts = [_random(sum(counts), 6), _random(3, 5, 6)], torch.tensor(counts)
    with fp64():
        ours, reference = (partial(function, counts=counts) for function in (kernels.grouped_linear, grouped_linear))
        if sum(counts):
            assert _same(ours, reference, inputs) < 1e-12
        else:
            given = [x.requires_grad_() for x in inputs]
            out = ours(*given)
            assert out.shape == (0, 5) and all(
                torch.equal(gradient, torch.zeros_like(x))
                for gradient, x in zip(torch.autograd.grad(out.sum(), given), given, strict=True)
            )


def test_the_grouped_product_of_an_npu_alone_gives_no_gradient(kernels):
    x, weight = _random(8, 6).requires_grad_(), _random(3, 6, 5).requires_grad_()
    options = {"group_list": torch.tensor([3, 0, 5]), "split_item": 3, "group_type": 0, "group_list_type": 1}
    assert not torch.ops.npu.npu_grouped_matmul([x], [weight], **options)[0].requires_grad


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "documents"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_means_on_an_npu_what_it_means_by_definition(kernels, documents, window, scale):
    inputs = [3 * _random(2, 13, heads, 8) for heads in (6, 2, 2)]
    options = {"documents": documents, "window": window, "scale": scale}

    with fp64():
        ours, reference = (partial(function, **options) for function in (kernels.attention, attention))
        assert _same(ours, reference, inputs) < 1e-12


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "documents"])
def test_values_narrower_than_keys_are_attended_to_as_they_are(kernels, documents):
    inputs = [_random(2, 13, 3, width) for width in (8, 8, 6)]
    with fp64():
        ours, reference = (partial(function, documents=documents) for function in (kernels.attention, attention))
        assert ours(*inputs).shape == (2, 13, 3, 6)
        assert _same(ours, reference, inputs) < 1e-12


@pytest.mark.parametrize("fault", ["inverted mask", "no mask", "no scale"])
def test_the_traps_of_the_operator_would_show(kernels, fault):
    q, k, v = (3 * _random(2, 13, heads, 8) for heads in (6, 2, 2))
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    options = {"atten_mask": hidden, "scale": 8**-0.5, "sparse_mode": 1, "head_num": 6, "input_layout": "BSND"}
    reference = attention(q, k, v)
    right = torch.ops.npu.npu_fusion_attention(q, k, v, **options)[0]
    assert float((right - reference).abs().max()) < 1e-5
    wrong = {"inverted mask": {"atten_mask": hidden.T}, "no mask": {"atten_mask": None}, "no scale": {"scale": 1.0}}
    faulty = torch.ops.npu.npu_fusion_attention(q, k, v, **{**options, **wrong[fault]})[0]
    assert float((faulty - reference).abs().max()) > 0.1


def test_attention_drops_on_an_npu_with_the_same_probability(kernels):
    q, k, v = (_random(2, 33, heads, 8) for heads in (6, 2, 2))
    torch.manual_seed(3)
    dropped = kernels.attention(q, k, v, dropout=0.25)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, attention(q, k, v, dropout=0.25), rtol=1e-5, atol=1e-5)


def test_norm_activation_and_rotary_mean_on_an_npu_what_they_mean_by_definition(kernels):
    angles = _random(2, 13, 1, 4)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    with fp64():
        norm = [_random(3, 7, 24), _random(24)]
        assert _same(lambda x, w: kernels.rms_norm(x, w, 1e-3), lambda x, w: rms_norm(x, w, 1e-3), norm) < 1e-12
        assert _same(kernels.swiglu, OPERATORS["swiglu"].reference, [_random(3, 5, 22)]) < 1e-12
        turn = [_random(2, 13, 3, 8)]
        assert _same(lambda x: kernels.rotary(x, cos, sin), lambda x: rotary(x, cos, sin), turn) < 1e-12


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x: ops.npu_rms_norm(x, x, eps=1e-5),
        lambda ops, x: ops.npu_swiglu(x, dims=-1),
        lambda ops, x: ops.npu_fusion_attention(x, x, x, head_num=6, input_layout="BSND", pre_tokens=4),
    ],
)
def test_a_call_that_the_real_schema_does_not_know_is_refused(library, call):
    with pytest.raises(RuntimeError, match=r"(?i)unknown keyword argument"):
        call(torch.ops.npu, _random(2, 13, 6, 8))


def test_an_npu_kernel_that_cannot_be_imported_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "mindspeed_kernels.npu.norm", raising=False)
    with pytest.raises(OpError, match=r"kernels\.rms_norm: .*npu.* cannot be loaded: No module named 'torch_npu'"):
        Kernels.for_device(NPU, {"rms_norm": "npu", "attention": "reference"})
