"""Mamba-2, and Bamba: Mamba-2 with attention in some layers, and an MLP in each."""

from mindspeed_parallel.mixers import Ssm

from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def mamba2(settings: Settings) -> Arch:
    """Layers are a mixer alone: there is no attention and no MLP."""
    settings.expect("hidden_act", "silu", "swish")
    settings.harmless(
        "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "expand"
    )  # of first weights
    settings.harmless("rescale_prenorm_residual", "chunk_size")  # of first weights; of execution
    settings.expect("norm_before_gate", None, False)
    settings.expect("rms_norm", None, True)
    settings.harmless("residual_in_fp32")  # transformers keeps the residual in the dtype of the model
    layers = settings.take("num_hidden_layers")
    return Arch(
        family="mamba2",
        num_layers=layers,
        hidden=settings.take("hidden_size"),
        vocab=settings.take("vocab_size"),
        max_positions=settings.take_or("max_position_embeddings", 2**20),  # it has no bound of its own
        norm_eps=settings.take("layer_norm_epsilon"),
        tied=settings.take("tie_word_embeddings"),
        recurrent=tuple(range(layers)),
        has_mlps=False,
        ssm=Ssm(
            heads=settings.take("num_heads"),
            head_dim=settings.take("head_dim"),
            groups=settings.take("n_groups"),
            state=settings.take("state_size"),
            conv=settings.take("conv_kernel"),
            conv_bias=bool(settings.take("use_conv_bias")),
            bias=bool(settings.take("use_bias")),
            step_limits=_limits(settings),
        ),
    )


def bamba(settings: Settings) -> Arch:
    """attn_layer_indices are the layers with attention."""
    settings.harmless(
        "num_logits_to_keep", "z_loss_coefficient"
    )  # of generation; of a loss that transformers leaves out
    settings.harmless("mamba_expand", "mamba_chunk_size")  # transformers checks the first; of execution
    settings.expect("z_loss_coefficient", 0.0)
    fields = decoder_fields(settings, "bamba", rope=settings.rope(partial=True))
    attention = settings.take_or("attn_layer_indices", ())
    return Arch(
        **fields,
        **attention_biases(settings),
        mlp_bias=bool(settings.take("mlp_bias")),
        recurrent=tuple(layer for layer in range(fields["num_layers"]) if layer not in attention),
        ssm=Ssm(
            heads=settings.take("mamba_n_heads"),
            head_dim=settings.take("mamba_d_head"),
            groups=settings.take("mamba_n_groups"),
            state=settings.take("mamba_d_state"),
            conv=settings.take("mamba_d_conv"),
            conv_bias=bool(settings.take("mamba_conv_bias")),
            bias=bool(settings.take("mamba_proj_bias")),
            step_limits=_limits(settings),
        ),
    )


def _limits(settings: Settings) -> tuple[float, float]:
    low, high = settings.take("time_step_limit")
    return float(low), float(high)


def mamba2_rules(arch: Arch) -> tuple[Rule, ...]:
    """Names of the first code of Mamba."""
    names = Names(base="backbone", embedding="embeddings", final_norm="norm_f", input_norm="norm", recurrent="mixer")
    return decoder_rules(arch, names)


def bamba_rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with other names around the MLP."""
    return decoder_rules(
        arch,
        Names(final_norm="final_layernorm", recurrent="mamba", mlp="feed_forward", pre_mlp="pre_ff_layernorm"),
    )


MAMBA2 = Family(name="mamba2", model_types=("mamba2",), arch=mamba2, rules=mamba2_rules)
BAMBA = Family(name="bamba", model_types=("bamba",), arch=bamba, rules=bamba_rules)
