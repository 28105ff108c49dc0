"""What the Llama-like families share: the keys they read alike, and their weight rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_parallel.mixers import Delta, Latent, Ssm

from ..weights.rule import FusedRule, Rule, Segment, stacked
from .arch import Arch, Moe, Rope
from .settings import Settings


def decoder_fields(
    settings: Settings,
    family: str,
    *,
    rope: Rope | None = None,
    activation: tuple[str, ...] = ("silu", "swish"),
    activation_key: str = "hidden_act",
) -> dict[str, Any]:
    """The fields of Arch that every Llama-like configuration names alike.

    ``rope``: the rotary embedding, where it is not read in the plain way. ``activation``: what ``activation_key`` may be.
    """
    heads, hidden = settings.take("num_attention_heads"), settings.take("hidden_size")
    settings.expect(activation_key, *activation)  # silu and swish are two names of one function
    return {
        "family": family,
        "num_layers": settings.take("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": settings.take_or("num_key_value_heads", heads),
        "head_dim": settings.take_or("head_dim", hidden // heads),
        "ffn": settings.take("intermediate_size"),
        "vocab": settings.take("vocab_size"),
        "max_positions": settings.take("max_position_embeddings"),
        "norm_eps": settings.take("rms_norm_eps"),
        "rope": rope or settings.rope(),
        "tied": settings.take("tie_word_embeddings"),
        "attention_dropout": settings.take("attention_dropout"),
    }


def attention_biases(settings: Settings) -> dict[str, Any]:
    """The fields that attention_bias sets where it puts a bias on q, k, v and o."""
    bias = bool(settings.take("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias}


def qwen_experts(settings: Settings, num_layers: int, **options: Any) -> Moe:
    """Experts as Qwen has them: in every decoder_sparse_step-th layer, but for those of mlp_only_layers."""
    expert_settings(settings)
    step, without = settings.take("decoder_sparse_step"), settings.take("mlp_only_layers")
    return Moe(
        layers=tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in without),
        num_experts=settings.take("num_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=settings.take("moe_intermediate_size"),
        normalised=bool(settings.take("norm_topk_prob")),
        **options,
    )


def expert_settings(settings: Settings) -> None:
    """Take the keys of a loss that balances experts: it is off unless the router's logits are asked for."""
    settings.expect("output_router_logits", False)
    settings.harmless("router_aux_loss_coef")


def deepseek_experts(settings: Settings, num_layers: int) -> Moe:
    """Experts as DeepSeek-V3 has them: sigmoid scores, a bias that balances them, groups, one shared expert or more."""
    expert_settings(settings)
    ffn = settings.take("moe_intermediate_size")
    settings.harmless("num_nextn_predict_layers")  # layers that transformers does not build
    return Moe(
        layers=tuple(range(settings.take("first_k_dense_replace"), num_layers)),
        num_experts=settings.take("n_routed_experts"),
        top_k=settings.take("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * settings.take("n_shared_experts"),
        score="sigmoid",
        normalised=bool(settings.take("norm_topk_prob")),
        scale=settings.take("routed_scaling_factor"),
        bias=True,
        groups=settings.take("n_group"),
        top_groups=settings.take("topk_group"),
        wide=True,
    )


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls the weights of a layer, where it does not do as Llama does."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # one name: the three stand one after the other in one matrix
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # the same
    pre_mlp: str = "post_attention_layernorm"  # the norm before the MLP
    post_attention: str = "post_self_attn_layernorm"  # the norms behind attention and MLP, of models that have them
    post_mlp: str = "post_mlp_layernorm"
    base: str = "model"  # all but the output layer
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    input_norm: str = "input_layernorm"
    recurrent: str = "linear_attn"  # the mixer with a state
    mlp: str = "mlp"  # the MLP or the experts
    router: str = "gate"
    expert: tuple[str, str, str] | None = (
        "gate_proj",
        "up_proj",
        "down_proj",
    )  # of one expert; None: all in one tensor
    shared: str = "shared_experts"  # the expert that computes every token
    shared_gate: str = "shared_expert_gate"

    @property
    def layer(self) -> str:
        """What the weights of a layer begin with."""
        return f"{self.base}.layers.{{L}}."


def decoder_rules(arch: Arch, names: Names | None = None) -> tuple[Rule, ...]:
    """The weights of a decoder. ``{L}`` stands for the layer."""
    names, hidden = names or Names(), arch.hidden
    embedding, ours = f"{names.base}.{names.embedding}.weight", "decoder.layers.{L}."
    rules = [_matrix("embedding.word_embeddings.weight", embedding, arch.vocab, hidden, cut=0)]
    if arch.attention_layers:
        rules += _attention_rules(arch, names)
    if arch.delta is not None:
        rules += _delta_rules(arch, arch.delta, names)
    if arch.ssm is not None:
        rules += _ssm_rules(arch, arch.ssm, names)
    if arch.mlp_layers:
        rules += _mlp_rules(arch, names)
    if arch.moe is not None and arch.expert_layers:
        rules += expert_rules(arch.moe, hidden, names)
    if arch.post_norms:
        rules += [
            _vector(f"{ours}post_self_attn_layernorm.weight", f"{names.layer}{names.post_attention}.weight", hidden),
            _vector(f"{ours}post_mlp_layernorm.weight", f"{names.layer}{names.post_mlp}.weight", hidden),
        ]
    rules.append(_vector("decoder.final_layernorm.weight", f"{names.base}.{names.final_norm}.weight", hidden))
    if not arch.tied:
        rules.append(_matrix("output_layer.weight", "lm_head.weight", arch.vocab, hidden, cut=0))
    return tuple(rules)


def _attention_rules(arch: Arch, names: Names) -> Iterator[Rule]:
    """Attention, over latents or not, in the layers that have it."""
    hf, ours = f"{names.layer}self_attn.", "decoder.layers.{L}.self_attention."
    some = {"layers": arch.attention_layers if arch.recurrent else None}
    inner = _query_rules(arch, names) if arch.latent is None else _latent_rules(arch, arch.latent, names)
    for rule in inner:
        yield replace(rule, **some)
    yield _matrix(f"{ours}linear_proj.weight", f"{hf}o_proj.weight", arch.hidden, arch.value_rows, cut=1, **some)
    if arch.o_bias:
        yield _vector(f"{ours}linear_proj.bias", f"{hf}o_proj.bias", arch.hidden, **some)
    if arch.has_sinks:
        sinks = _vector(f"{ours}core_attention.softmax_offset", f"{hf}sinks", arch.num_heads, **some)
        yield replace(sinks, cut=0)


def _mlp_rules(arch: Arch, names: Names) -> Iterator[Rule]:
    """The MLP and the norm before it, in the layers that have it."""
    hf, ours, hidden = f"{names.layer}{names.mlp}.", "decoder.layers.{L}.mlp.", arch.hidden
    some = {"layers": None if arch.moe is None else arch.mlp_layers}
    gate_up = _Joined(
        names=tuple(f"{hf}{name}" for name in names.gate_up),
        rows=(arch.ffn, arch.ffn),
        order=stacked(arch.ffn, arch.ffn),
    )
    if arch.pre_norms:
        before = f"{names.layer}{names.pre_mlp}.weight"
        yield _vector(f"{ours}linear_fc1.layer_norm_weight", before, hidden, **some)
    yield gate_up.rule(f"{ours}linear_fc1.weight", hidden, **some)
    yield _matrix(f"{ours}linear_fc2.weight", f"{hf}down_proj.weight", hidden, arch.ffn, cut=1, **some)
    if arch.mlp_bias:
        yield gate_up.rule(f"{ours}linear_fc1.bias", None, **some)
        yield _vector(f"{ours}linear_fc2.bias", f"{hf}down_proj.bias", hidden, **some)


def _query_rules(arch: Arch, names: Names) -> Iterator[Rule]:
    """The norm before attention, and queries, keys and values."""
    hf, ours = names.layer, "decoder.layers.{L}.self_attention."
    qkv = _Joined(
        names=tuple(f"{hf}self_attn.{name}" for name in names.qkv),
        rows=(arch.query_rows * (1 + arch.output_gate), arch.kv_rows, arch.kv_rows),
        order=_by_kv_head(arch),
    )
    if arch.pre_norms:
        yield _vector(f"{ours}linear_qkv.layer_norm_weight", f"{hf}{names.input_norm}.weight", arch.hidden)
    yield qkv.rule(f"{ours}linear_qkv.weight", arch.hidden)
    if arch.qkv_bias:
        yield qkv.rule(f"{ours}linear_qkv.bias", None)
    if arch.qk_norm != "none":
        for name, wide in (("q", arch.query_rows), ("k", arch.kv_rows)):
            rows, cut = (arch.head_dim, None) if arch.qk_norm == "head" else (wide, 0)
            norm = _vector(f"{ours}{name}_layernorm.weight", f"{hf}self_attn.{name}_norm.weight", rows)
            yield replace(norm, cut=cut)


def _latent_rules(arch: Arch, latent: Latent, names: Names) -> Iterator[Rule]:
    """The norm before attention, and the ways to the latents and from them, in the order of Hugging Face."""
    hf, ours, hidden = f"{names.layer}self_attn.", "decoder.layers.{L}.self_attention.", arch.hidden
    yield _vector("decoder.layers.{L}.input_layernorm.weight", f"{names.layer}{names.input_norm}.weight", hidden)
    ways = [("kv", "kv_a_proj_with_mqa", latent.kv_rank, latent.kv_rank + latent.turned)]
    if latent.q_rank:
        ways.insert(0, ("q", "q_a_proj", latent.q_rank, latent.q_rank))
    else:
        yield _matrix(f"{ours}linear_q_proj.weight", f"{hf}q_proj.weight", arch.query_rows, hidden, cut=0)
    for name, down, rank, rows in ways:
        yield _matrix(f"{ours}linear_{name}_down_proj.weight", f"{hf}{down}.weight", rows, hidden, cut=None)
        if latent.bias:
            yield _vector(f"{ours}linear_{name}_down_proj.bias", f"{hf}{down}.bias", rows)
        up = f"{ours}linear_{name}_up_proj."
        yield _vector(f"{up}layer_norm_weight", f"{hf}{name}_a_layernorm.weight", rank)
        wide = arch.query_rows if name == "q" else arch.num_heads * (latent.plain + latent.value)
        yield _matrix(f"{up}weight", f"{hf}{name}_b_proj.weight", wide, rank, cut=0)


def _delta_rules(arch: Arch, delta: Delta, names: Names) -> Iterator[Rule]:
    """A gated delta network. Our rows stand by key head, each with its value heads, and so do those of in_proj here."""
    each = delta.value_heads // delta.key_heads
    sizes = (*(delta.key_dim,) * 2, *(each * delta.value_dim,) * 2, *(each,) * 2)  # of q, k, v, gate, beta, step
    first, second = sum(sizes[:4]), sum(sizes[4:])
    order: list[Segment] = []
    for head in range(delta.key_heads):
        order += [
            Segment(source=0, start=head * first, stop=(head + 1) * first),
            Segment(source=1, start=head * second, stop=(head + 1) * second),
        ]
    hf = f"{names.layer}{names.recurrent}."
    projection = Rule(
        ours="in_proj.weight",
        hf=(f"{hf}in_proj_qkvz.weight", f"{hf}in_proj_ba.weight"),
        rows=(delta.key_heads * first, delta.key_heads * second),
        width=arch.hidden,
        order=tuple(order),
        cut=0,
    )
    yield from _recurrent_rules(
        arch,
        names,
        projection=projection,
        conv=(_by_group(delta.key_heads, sizes[:3]), delta.conv, False),
        heads=delta.value_heads,
        width=delta.value_heads * delta.value_dim,
    )
    norm = _vector("decoder.layers.{L}.self_attention.out_norm.plain_weight", f"{hf}norm.weight", delta.value_dim)
    yield replace(norm, layers=arch.recurrent)


def _ssm_rules(arch: Arch, ssm: Ssm, names: Names) -> Iterator[Rule]:
    """Mamba-2. Our rows stand by group, each with its heads."""
    each, hf = ssm.heads // ssm.groups, f"{names.layer}{names.recurrent}."
    width = ssm.heads * ssm.head_dim
    sizes = (*(each * ssm.head_dim,) * 2, *(ssm.state,) * 2, each)  # of gate, x, B, C, step
    order = _by_group(ssm.groups, sizes)
    rows = ssm.groups * sum(sizes)
    projection = Rule(
        ours="in_proj.weight", hf=(f"{hf}in_proj.weight",), rows=(rows,), width=arch.hidden, order=order, cut=0
    )
    yield from _recurrent_rules(
        arch,
        names,
        projection=projection,
        conv=(_by_group(ssm.groups, sizes[1:4]), ssm.conv, ssm.conv_bias),
        heads=ssm.heads,
        width=width,
    )
    ours, some = "decoder.layers.{L}.self_attention.", {"layers": arch.recurrent}
    yield replace(_vector(f"{ours}D", f"{hf}D", ssm.heads, **some), cut=0)
    yield replace(_vector(f"{ours}norm.weight", f"{hf}norm.weight", width, **some), cut=0)
    if ssm.bias:
        yield replace(projection, ours=f"{ours}in_proj.bias", hf=(f"{hf}in_proj.bias",), width=None, **some)
        yield _vector(f"{ours}out_proj.bias", f"{hf}out_proj.bias", arch.hidden, **some)


def _recurrent_rules(
    arch: Arch,
    names: Names,
    *,
    projection: Rule,
    conv: tuple[tuple[Segment, ...], int, bool],
    heads: int,
    width: int,
) -> Iterator[Rule]:
    """What mixers with a state share. ``conv``: the order of its channels, its width, whether it has a bias."""
    hf, ours, some = (
        f"{names.layer}{names.recurrent}.",
        "decoder.layers.{L}.self_attention.",
        {"layers": arch.recurrent},
    )
    before = f"{names.layer}{names.input_norm}.weight"
    yield _vector(f"{ours}in_proj.layer_norm_weight", before, arch.hidden, **some)
    yield replace(projection, ours=f"{ours}{projection.ours}", **some)
    order, tokens, has_bias = conv
    channels = sum(item.stop - item.start for item in order)
    weight = Rule(
        ours=f"{ours}conv1d.weight",
        hf=(f"{hf}conv1d.weight",),
        rows=(channels,),
        width=(1, tokens),
        order=order,
        cut=0,
        layers=arch.recurrent,
    )
    yield weight
    if has_bias:
        yield replace(weight, ours=f"{ours}conv1d.bias", hf=(f"{hf}conv1d.bias",), width=None)
    for name in ("A_log", "dt_bias"):
        yield replace(_vector(f"{ours}{name}", f"{hf}{name}", heads, **some), cut=0)
    yield _matrix(f"{ours}out_proj.weight", f"{hf}out_proj.weight", arch.hidden, width, cut=1, **some)


def _by_group(groups: int, sizes: Sequence[int]) -> tuple[Segment, ...]:
    """The order of parts that stand one after the other, taken group by group; ``sizes`` of each part in a group."""
    starts = [groups * sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        Segment(source=0, start=start + group * size, stop=start + (group + 1) * size)
        for group in range(groups)
        for start, size in zip(starts, sizes, strict=True)
    )


def expert_rules(moe: Moe, hidden: int, names: Names) -> Iterator[Rule]:
    """The weights of the layers that have experts."""
    hf, ours = f"{names.layer}{names.mlp}.", "decoder.layers.{L}.mlp."
    some = {"layers": moe.layers}
    before = f"{names.layer}{names.pre_mlp}.weight"
    yield _vector("decoder.layers.{L}.pre_mlp_layernorm.weight", before, hidden, **some)
    yield _matrix(f"{ours}router.weight", f"{hf}{names.router}.weight", moe.num_experts, hidden, cut=None, **some)
    if moe.bias:
        bias = _vector(
            f"{ours}router.expert_bias", f"{hf}{names.router}.e_score_correction_bias", moe.num_experts, **some
        )
        yield replace(bias, is_trained=False)
    yield from _separate_expert_rules(moe, hidden, names) if names.expert else _fused_expert_rules(moe, hidden, names)
    if moe.biased:
        yield _vector(f"{ours}router.bias", f"{hf}{names.router}.bias", moe.num_experts, **some)
    if moe.shared_ffn:
        shared = _Joined(
            names=tuple(f"{hf}{names.shared}.{name}" for name in ("gate_proj", "up_proj")),
            rows=(moe.shared_ffn,) * 2,
            order=stacked(moe.shared_ffn, moe.shared_ffn),
        )
        yield shared.rule(f"{ours}shared_experts.linear_fc1.weight", hidden, **some)
        down = f"{hf}{names.shared}.down_proj.weight"
        yield _matrix(f"{ours}shared_experts.linear_fc2.weight", down, hidden, moe.shared_ffn, cut=1, **some)
    if moe.shared_gate:
        gate = f"{hf}{names.shared_gate}.weight"
        yield _matrix(f"{ours}shared_experts.gate_weight", gate, 1, hidden, cut=None, **some)


def _fused_expert_rules(moe: Moe, hidden: int, names: Names) -> Iterator[Rule]:
    """All experts in one tensor, columns before rows, gate and up row by row in turn (gpt-oss)."""
    hf, ours = f"{names.layer}{names.mlp}.experts.", "decoder.layers.{L}.mlp.experts.experts."
    turns = tuple(Segment(source=0, start=start, stop=2 * moe.ffn, step=2) for start in (0, 1))
    for fc, matrix, rows, width, order in (
        ("linear_fc1", "gate_up_proj", 2 * moe.ffn, hidden, turns),
        ("linear_fc2", "down_proj", hidden, moe.ffn, stacked(hidden)),
    ):
        fields: dict[str, Any] = {"rows": (rows,), "order": order, "cut": None, "stack": moe.num_experts}
        weight, bias = f"{ours}{fc}.weight", f"{ours}{fc}.bias"
        yield FusedRule(ours=weight, hf=(f"{hf}{matrix}",), width=width, transposed=True, layers=moe.layers, **fields)
        if moe.biased:
            yield FusedRule(ours=bias, hf=(f"{hf}{matrix}_bias",), width=None, layers=moe.layers, **fields)


def _separate_expert_rules(moe: Moe, hidden: int, names: Names) -> Iterator[Rule]:
    """Matrices of their own for every expert."""
    hf, ours = f"{names.layer}{names.mlp}.", "decoder.layers.{L}.mlp."
    assert names.expert is not None
    gate, up, down = names.expert
    for fc, matrices, rows, width in (
        ("linear_fc1", (gate, up), (moe.ffn, moe.ffn), hidden),
        ("linear_fc2", (down,), (hidden,), moe.ffn),
    ):
        yield Rule(
            ours=f"{ours}experts.experts.{fc}.weight",
            hf=tuple(f"{hf}experts.{n}.{matrix}.weight" for n in range(moe.num_experts) for matrix in matrices),
            rows=rows,
            width=width,
            order=stacked(*rows),
            cut=None,
            stack=moe.num_experts,
            layers=moe.layers,
        )


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Matrices that are one of ours: each a Hugging Face tensor of its own, or all one after the other in one."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    order: tuple[Segment, ...]  # over the matrices

    def rule(self, ours: str, width: int | None, **options: Any) -> Rule:
        """The rule of the weight, or, without ``width``, of the bias."""
        kind = "bias" if width is None else "weight"
        hf, rows, order = tuple(f"{name}.{kind}" for name in self.names), self.rows, self.order
        if len(hf) == 1:
            first = [sum(rows[:source]) for source in range(len(rows))]
            rows = (sum(rows),)
            order = tuple(
                Segment(source=0, start=first[item.source] + item.start, stop=first[item.source] + item.stop)
                for item in order
            )
        return Rule(ours=ours, hf=hf, rows=rows, width=width, order=order, cut=0, **options)


def _by_kv_head(arch: Arch) -> tuple[Segment, ...]:
    """megatron-core's order of q, k and v: for each kv head its query heads, their gates, its key, its value."""
    dim, each = arch.head_dim, arch.num_heads // arch.num_kv_heads
    step = 2 if arch.output_gate else 1  # in Hugging Face format, each query head has its gate behind it
    found: list[Segment] = []
    for head in range(arch.num_kv_heads):
        if arch.output_gate:
            for part in range(step):
                starts = [(step * query + part) * dim for query in range(head * each, (head + 1) * each)]
                found += [Segment(source=0, start=start, stop=start + dim) for start in starts]
        else:
            found.append(Segment(source=0, start=head * each * dim, stop=(head + 1) * each * dim))
        found += [Segment(source=source, start=head * dim, stop=(head + 1) * dim) for source in (1, 2)]
    return tuple(found)


def _matrix(ours: str, hf: str, rows: int, width: int, *, cut: int | None, **options: Any) -> Rule:
    return Rule(ours=ours, hf=(hf,), rows=(rows,), width=width, order=stacked(rows), cut=cut, **options)


def _vector(ours: str, hf: str, rows: int, **options: Any) -> Rule:
    return Rule(ours=ours, hf=(hf,), rows=(rows,), width=None, order=stacked(rows), cut=None, **options)
