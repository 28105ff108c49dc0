"""A decoder that knows documents and positions.   Letters: S sequence, B batch, V vocabulary."""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from .config import DecoderConfig, PackedDocuments
from .rotary import NoRotary, Rotary


class Decoder(GPTModel):
    """GPTModel with explicit positions and a vocabulary whose padding stays out of the softmax."""

    def __init__(self, config: DecoderConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if self.pre_process and config.embedding_scale != 1:
            # GPTModel makes its embedding itself, by name.
            self.embedding.register_forward_hook(partial(_scaled, config.embedding_scale))
        if self.post_process and config.head_scale != 1:
            self.output_layer.register_forward_pre_hook(partial(_scaled_first, config.head_scale))
        if self.post_process and config.logit_cap is not None:
            self.output_layer.register_forward_hook(partial(_capped, config.logit_cap))

    def use_rotary(self, rotary: Rotary | None, local: Rotary | None = None) -> None:
        """Take the angles from ``rotary``, in layers with a window from ``local``, if it is given. None: nothing turns."""
        self.rotary_pos_emb, self.local_rotary = rotary or NoRotary(), local

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        *arguments: Any,
        packed_seq_params: PackedDocuments | None = None,
        **options: Any,
    ) -> Tensor:
        """Losses (B, S) when ``labels`` are given, else logits (B, S, V of this rank).

        input_ids, position_ids (B, S). Stages of a pipeline other than the last return hidden states.
        """
        local, dtype = self.local_rotary, self.config.params_dtype
        packed = PackedDocuments(
            qkv_format="sbhd",
            documents=None if packed_seq_params is None else packed_seq_params.documents,
            turns=self.rotary_pos_emb.turns(position_ids, dtype),
            local_turns=None if local is None else local.turns(position_ids, dtype),
        )
        return super().forward(input_ids, position_ids, attention_mask, *arguments, packed_seq_params=packed, **options)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of every token.   labels (B, S), logits (S, B, V of this rank) -> (B, S)."""
        return super().compute_language_model_loss(labels.clamp(min=0), self._without_padding(logits))

    def _without_padding(self, logits: Tensor) -> Tensor:
        local = logits.shape[-1]
        true = self.config.num_tokens - local * self.pg_collection.tp.rank()  # pyright: ignore[reportAttributeAccessIssue]  of DecoderConfig
        if true >= local:
            return logits
        padding = torch.arange(local, device=logits.device) >= true
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _scaled(scale: float, module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
    """What the embedding gives, times ``scale`` as a number of its dtype."""
    return embedded * torch.tensor(scale, dtype=embedded.dtype).item()


def _scaled_first(scale: float, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What goes into the output layer, times ``scale``."""
    hidden, *others = arguments
    return (hidden * scale, *others)


def _capped(cap: float, module: nn.Module, arguments: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Logits that stay below ``cap`` (Gemma 2, 2024)."""
    logits, bias = out
    return cap * (logits / cap).tanh(), bias
