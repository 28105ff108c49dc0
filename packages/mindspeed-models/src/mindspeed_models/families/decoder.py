"""What the Llama-like families share: the keys they read alike, and their weight rules."""

from typing import Any

from ..weights.rule import Rule, Segment, stacked
from .arch import Arch
from .settings import Settings


def decoder_fields(settings: Settings, family: str) -> dict[str, Any]:
    """The fields of Arch that every Llama-like configuration names alike."""
    heads, hidden = settings.take("num_attention_heads"), settings.take("hidden_size")
    settings.expect("hidden_act", "silu", "swish")  # two names of one function
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
        "rope": settings.rope(),
        "tied": settings.take("tie_word_embeddings"),
        "attention_dropout": settings.take("attention_dropout"),
    }


def decoder_rules(arch: Arch) -> tuple[Rule, ...]:
    """The weights of a Llama-like decoder. ``{L}`` stands for the layer."""
    hf, ours, hidden = "model.layers.{L}.", "decoder.layers.{L}.", arch.hidden
    qkv = (arch.query_rows, arch.kv_rows, arch.kv_rows)
    q, k, v = (f"{hf}self_attn.{name}_proj." for name in "qkv")
    gate, up = f"{hf}mlp.gate_proj.", f"{hf}mlp.up_proj."
    attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
    rules = [
        _matrix("embedding.word_embeddings.weight", "model.embed_tokens.weight", arch.vocab, hidden, cut=0),
        _vector(f"{attention}linear_qkv.layer_norm_weight", f"{hf}input_layernorm.weight", hidden),
        Rule(
            ours=f"{attention}linear_qkv.weight",
            hf=(f"{q}weight", f"{k}weight", f"{v}weight"),
            rows=qkv,
            width=hidden,
            order=_by_kv_head(arch),
            cut=0,
        ),
        _matrix(f"{attention}linear_proj.weight", f"{hf}self_attn.o_proj.weight", hidden, arch.query_rows, cut=1),
        _vector(f"{mlp}linear_fc1.layer_norm_weight", f"{hf}post_attention_layernorm.weight", hidden),
        Rule(
            ours=f"{mlp}linear_fc1.weight",
            hf=(f"{gate}weight", f"{up}weight"),
            rows=(arch.ffn, arch.ffn),
            width=hidden,
            order=stacked(arch.ffn, arch.ffn),
            cut=0,
        ),
        _matrix(f"{mlp}linear_fc2.weight", f"{hf}mlp.down_proj.weight", hidden, arch.ffn, cut=1),
        _vector("decoder.final_layernorm.weight", "model.norm.weight", hidden),
    ]
    if not arch.tied:
        rules.append(_matrix("output_layer.weight", "lm_head.weight", arch.vocab, hidden, cut=0))
    if arch.qk_norm:
        rules += [
            _vector(f"{attention}{name}_layernorm.weight", f"{hf}self_attn.{name}_norm.weight", arch.head_dim)
            for name in "qk"
        ]
    if arch.qkv_bias:
        names = (f"{q}bias", f"{k}bias", f"{v}bias")
        rules.append(
            Rule(ours=f"{attention}linear_qkv.bias", hf=names, rows=qkv, width=None, order=_by_kv_head(arch), cut=0)
        )
    if arch.o_bias:
        rules.append(_vector(f"{attention}linear_proj.bias", f"{hf}self_attn.o_proj.bias", hidden))
    if arch.mlp_bias:
        names = (f"{gate}bias", f"{up}bias")
        rows, order = (arch.ffn, arch.ffn), stacked(arch.ffn, arch.ffn)
        rules.append(Rule(ours=f"{mlp}linear_fc1.bias", hf=names, rows=rows, width=None, order=order, cut=0))
        rules.append(_vector(f"{mlp}linear_fc2.bias", f"{hf}mlp.down_proj.bias", hidden))
    return tuple(rules)


def _by_kv_head(arch: Arch) -> tuple[Segment, ...]:
    """megatron-core's order of q, k and v: for each kv head its query heads, its key, its value."""
    group = arch.num_heads // arch.num_kv_heads * arch.head_dim
    found = []
    for head in range(arch.num_kv_heads):
        found.append(Segment(source=0, start=head * group, stop=(head + 1) * group))
        found += [
            Segment(source=source, start=head * arch.head_dim, stop=(head + 1) * arch.head_dim) for source in (1, 2)
        ]
    return tuple(found)


def _matrix(ours: str, hf: str, rows: int, width: int, *, cut: int) -> Rule:
    return Rule(ours=ours, hf=(hf,), rows=(rows,), width=width, order=stacked(rows), cut=cut)


def _vector(ours: str, hf: str, rows: int) -> Rule:
    return Rule(ours=ours, hf=(hf,), rows=(rows,), width=None, order=stacked(rows), cut=None)
