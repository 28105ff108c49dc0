"""GGUF files, dequantised by transformers.

transformers reads the keys and tensors of a GGUF file that it knows and passes over the rest in silence: a stretched
rotary embedding or a bias would be lost without a word. So every key and every tensor is looked at here first, and one
that is not understood is refused by name.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, WeightError
from .ledger import Ledger
from .rule import cover
from .shards import Box
from .source import Source

_READ = (  # keys that transformers reads, below the name of the architecture
    "context_length",
    "block_count",
    "feed_forward_length",
    "embedding_length",
    "rope.freq_base",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "vocab_size",
)
_HEAD_WIDTH = ("rope.dimension_count", "attention.key_length", "attention.value_length")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


class GGUFSource(Source):
    """A GGUF file. Opening it reads its header; its weights are in memory, in float32, once one of them is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
            raise ModelError(f"{path}: GGUF files need {missing[0]}; install mindspeed-models[gguf]")
        self.keys, self.tensors = _header(path)
        # The file does not say whether the output is tied: it is when there is no separate matrix.
        self.config = {**_config(path), "tie_word_embeddings": "output.weight" not in self.tensors}

    def check(self) -> None:
        self._check_keys()
        shapes = {}
        for name, (shape, _) in self.tensors.items():
            if (hf := _hf_name(name)) is None:
                raise WeightError(f"{self.path}: holds {name}, which transformers does not read from GGUF files")
            shapes[hf] = shape
        cover(self.rules, shapes)

    def read(self, box: Box, *, ledger: Ledger | None = None) -> Tensor:
        read = self._part if ledger is None else ledger.reading(self._part)
        return self.rules[box.key].pack(read, box.offset, box.shape)

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {hf: rule.hf_shape(n) for rule in self.rules.values() for n, hf in enumerate(rule.hf)}

    def copy_description(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = AutoConfig.for_model(**self.config)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.dtype = "float32"
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name).save_pretrained(folder)

    def _part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return self._weights[name][part]

    @cached_property
    def _weights(self) -> Mapping[str, Tensor]:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path.parent, gguf_file=self.path.name, dtype=torch.float32)
        return model.state_dict()

    def _check_keys(self) -> None:
        arch = self.arch
        for key, value in self.keys.items():
            if key in _READ:
                continue
            if key in _HEAD_WIDTH and value == arch.head_dim:
                continue
            if key == "attention.sliding_window" and arch.windows and {value} == set(arch.windows):
                continue
            if key in ("rope.scaling.type", "attention.causal") and value in ("none", True):
                continue
            raise ModelError(
                f"{self.path}: the key {key}={value!r} is not read by transformers and may change what the model "
                "computes; start from the model's Hugging Face folder"
            )


def _header(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]:
    """Keys of the architecture, and shape and quantisation of every tensor. WeightError for a damaged file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        name = reader.fields["general.architecture"].contents()
        keys = {
            key.removeprefix(f"{name}."): field for key, field in reader.fields.items() if key.startswith(f"{name}.")
        }
        found = {key: field.contents() for key, field in keys.items()}
        tensors = {
            tensor.name: (tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)
            for tensor in reader.tensors
        }
    except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
        raise WeightError(f"{path}: not a GGUF file, or cut short ({error}); download it again") from error
    return found, tensors


def _config(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    except ValueError as error:  # transformers' word for an architecture that it cannot read
        raise ModelError(f"{path}: {error}") from error
    config.pop("quantization_config", None)
    return config


def _hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, for the families of this project."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else None
    return f"model.layers.{int(layer)}.{_LAYER[part]}.{kind}" if part in _LAYER else None
