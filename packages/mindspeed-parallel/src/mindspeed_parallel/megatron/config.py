"""What megatron-core's configuration does not hold, and what is handed to every layer beside the hidden states.

Letters: S sequence, B batch, D head dim.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.ops.routing import Choice
from torch import Tensor

from ..mixers import Delta, Latent, Ssm


@dataclass
class DecoderConfig(TransformerConfig):
    """megatron-core's configuration and what our layers need besides."""

    kernels: Kernels | None = None
    windows: tuple[
        int | None, ...
    ] = ()  # sliding window of every layer of the whole model, itself counted; empty: none
    unturned: tuple[int, ...] = ()  # layers of the whole model without rotary embedding
    interleaved: bool = False  # rotary pairs are neighbours (2 i, 2 i + 1), not halves (i, i + D / 2)
    activation: Literal["swiglu", "geglu", "clamped_swiglu"] = "swiglu"  # of the gated MLP
    activation_options: tuple[tuple[str, float], ...] = ()  # its numbers, by name
    norm_offset: float = 0.0  # added to the weight of every norm
    norm_rounds_last: bool = False  # norms multiply by their weight before they round
    embedding_scale: float = 1.0  # what the embedding of a token is multiplied by
    residual_scale: float = 1.0  # what layers add is multiplied by
    head_scale: float = 1.0  # what goes into the output layer is multiplied by
    attention_cap: float | None = None  # scores of attention stay below
    has_sinks: bool = False  # attention has a key without a value for each head
    logit_cap: float | None = None  # logits stay below
    latent: Latent | None = None  # attention over latents, where layers have it
    delta: Delta | None = None  # gated delta networks
    ssm: Ssm | None = None  # Mamba-2
    choice: Choice | None = None  # how experts are chosen, where there are any
    router_has_bias: bool = False  # a number for each expert is added to its score in choosing alone
    router_is_biased: bool = False  # logits have a bias
    experts_are_biased: bool = False
    router_is_wide: bool = False  # the router computes in float32 at least
    num_tokens: int = 0  # true size of the vocabulary, without the rows that pad it


@dataclass
class PackedDocuments(PackedSeqParams):
    """What attention must know of each token, in the form in which megatron-core hands such things to it.

    ``documents`` (B, S): attention stays inside equal numbers. None: causal attention is enough.
    ``turns``: cosines and sines (B, S, 1, R) of the rotary angles, the first R <= D of each head; the decoder adds them.
    ``local_turns``: those of layers with a window, where they have other ones.
    """

    documents: Tensor | None = None
    turns: tuple[Tensor, Tensor] | None = None
    local_turns: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, documents: Tensor | None, length: int) -> "PackedDocuments | None":
        """None where nothing has to be kept apart."""
        if documents is None:
            return None
        return cls(qkv_format="sbhd", max_seqlen_q=length, max_seqlen_kv=length, documents=documents)
