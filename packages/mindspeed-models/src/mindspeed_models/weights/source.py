"""Where first weights come from: a Hugging Face folder, a GGUF file, or a checkpoint of this project.

A source knows its model, answers for any box of any of our tensors, and carries the files that describe the model:
configuration, tokenizer, generation settings.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, WeightError
from ..families import Arch, Family, describe
from .rule import Rule, cover, expanded
from .safetensors_files import INDEX, SINGLE, SafetensorsFolder
from .shards import Box, load_pieces, stored

DESCRIPTION = (  # files that travel with the weights, byte for byte
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_BUFFERS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Source(ABC):
    """Weights of a model, by box of our tensors, and what describes the model."""

    path: Path
    config: Mapping[str, Any]  # config.json

    @cached_property
    def _described(self) -> tuple[Family, Arch]:
        return describe(self.config)

    @property
    def family(self) -> Family:
        """The family that reads the configuration."""
        return self._described[0]

    @property
    def arch(self) -> Arch:
        """Sizes and switches."""
        return self._described[1]

    @cached_property
    def rules(self) -> Mapping[str, Rule]:
        """Rules of every layer, by our name."""
        return expanded(self.family.rules(self.arch), self.arch.num_layers)

    @abstractmethod
    def check(self) -> None:
        """WeightError unless every weight of the model is there, in its shape. Reads no weights."""

    @abstractmethod
    def read(self, box: Box) -> Tensor:
        """The part of one of our tensors that ``box`` names, in its stored dtype."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of one of our tensors."""

    @abstractmethod
    def copy_description(self, folder: Path) -> None:
        """Put configuration, tokenizer and generation settings into ``folder``."""

    def whole(self, name: str) -> Box:
        """The box that is all of one of our tensors."""
        shape = self.rules[name].shape
        return Box(key=name, whole=shape, offset=(0,) * len(shape), shape=shape)


def read_config(path: Path) -> Mapping[str, Any]:
    """config.json of what ``path`` holds, without a look at the weights."""
    if path.is_file() or any(path.glob("*.gguf")):
        return open_source(path).config
    folder = path / "hf" if (path / "model").is_dir() else path
    if not (folder / "config.json").is_file():
        raise ModelError(f"{path}: neither a Hugging Face folder (no config.json) nor a checkpoint (no model/)")
    return _json(folder / "config.json")


def open_source(path: Path) -> Source:
    """The source at ``path``; ModelError or WeightError, by name, for what is not one. Checks all but the values."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; name a Hugging Face folder, a GGUF file or a checkpoint")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model is a folder or a .gguf file")
        source: Source = GGUFSource(path)
    elif (path / "model").is_dir():
        source = CheckpointSource(path)
    elif (path / "config.json").is_file():
        source = HuggingFaceSource(path)
    elif len(found := sorted(path.glob("*.gguf"))) == 1:
        source = GGUFSource(found[0])
    else:
        raise ModelError(f"{path}: neither a Hugging Face folder (no config.json) nor a checkpoint (no model/)")
    source.check()
    return source


class HuggingFaceSource(Source):
    """A folder with config.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json(path / "config.json")
        if not (path / INDEX).exists() and not (path / SINGLE).exists():
            if any(path.glob("*.bin")):
                raise WeightError(
                    f"{path}: its weights are pickled .bin files, which can run code; "
                    "load and save the model once with transformers to get safetensors"
                )
            raise WeightError(f"{path}: no {SINGLE} and no {INDEX}; the download is incomplete")

    @cached_property
    def files(self) -> SafetensorsFolder:
        """The weight files, checked."""
        return SafetensorsFolder(self.path)

    def check(self) -> None:
        shapes = {name: entry.shape for name, entry in self.files.entries.items() if not name.endswith(_BUFFERS)}
        # Some tied models store the embedding twice. Two that differ are two models.
        twice = self.arch.tied and shapes.pop(_LM_HEAD, None) is not None
        if twice and not torch.equal(self.files.read(_LM_HEAD), self.files.read(_EMBEDDING)):
            raise WeightError(
                f"{self.path}: config.json says tie_word_embeddings, but {_LM_HEAD} differs from {_EMBEDDING}"
            )
        cover(self.rules, shapes)

    def read(self, box: Box) -> Tensor:
        return self.rules[box.key].pack(self.files.read, box.offset, box.shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.files.entries[self.rules[name].hf[0]].dtype

    def copy_description(self, folder: Path) -> None:
        _copy(self.path, folder)


class GGUFSource(Source):
    """A GGUF file, dequantised by transformers. The whole model is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_installed()
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
        config.pop("quantization_config", None)
        # A GGUF file does not say whether the output is tied: it is when there is no separate matrix.
        self.config = {**config, "tie_word_embeddings": not self._has_output()}

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path.parent, gguf_file=self.path.name, dtype=torch.float32)
        # It is dequantised: what is left of the quantisation would keep it from being saved and loaded.
        del model.config.quantization_config
        return model

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tensors = dict(self._model.state_dict())
        if self.arch.tied:
            tensors.pop(_LM_HEAD, None)
        return tensors

    def check(self) -> None:
        cover(self.rules, {name: tensor.shape for name, tensor in self._tensors.items()})

    def read(self, box: Box) -> Tensor:
        return self.rules[box.key].pack(lambda name, part: self._tensors[name][part], box.offset, box.shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[self.rules[name].hf[0]].dtype

    def copy_description(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._model.config.save_pretrained(folder)
        if self._model.generation_config is not None:
            self._model.generation_config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name).save_pretrained(folder)

    def _has_output(self) -> bool:
        from gguf import GGUFReader

        return any(tensor.name == "output.weight" for tensor in GGUFReader(self.path).tensors)

    def _check_installed(self) -> None:
        from importlib.util import find_spec

        if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
            raise ModelError(f"{self.path}: GGUF files need {missing[0]}; install mindspeed-models[gguf]")


class CheckpointSource(Source):
    """A checkpoint folder of this project: ``model/`` and ``hf/``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json(path / "hf" / "config.json")

    @cached_property
    def entries(self) -> Mapping[str, Any]:
        """Stored tensors by our name."""
        return stored(self.path / "model")

    def check(self) -> None:
        for name, rule in self.rules.items():
            if name not in self.entries:
                raise WeightError(f"{self.path / 'model'}: {name} is missing; the checkpoint is of another model")
            if tuple(self.entries[name].size) != rule.shape:
                raise WeightError(
                    f"{self.path / 'model'}: {name} has shape {tuple(self.entries[name].size)}, hf/config.json means {rule.shape}"
                )
        if strays := [name for name in self.entries if name not in self.rules]:
            raise WeightError(
                f"{self.path / 'model'}: {strays[0]} is no part of the model that hf/config.json describes"
            )

    def read(self, box: Box) -> Tensor:
        tensor = torch.empty(box.shape, dtype=self.dtype(box.key))
        load_pieces(self.path / "model", [(box, tensor)])
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        return self.entries[name].properties.dtype

    def copy_description(self, folder: Path) -> None:
        _copy(self.path / "hf", folder)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: missing") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a model configuration")
    return found


def _copy(source: Path, folder: Path) -> None:
    for name in DESCRIPTION:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
