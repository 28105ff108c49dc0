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
from mindspeed_runtime.rundir import read_manifest
from torch import Tensor

from ..errors import ModelError, WeightError
from ..families import Arch, Family, describe
from .ledger import Ledger
from .rule import Rule, cover, expanded
from .safetensors_files import INDEX, SINGLE, SafetensorsFolder
from .shards import Box, Shards

TOKENIZER = (  # files that are a tokenizer
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",  # a folder
)
DESCRIPTION = ("config.json", "generation_config.json", *TOKENIZER)  # files that travel with the weights, byte for byte
_BUFFERS = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "self_attn.bias", "self_attn.masked_bias")
_LM_HEAD = "lm_head.weight"


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
    def read(self, box: Box, *, ledger: Ledger | None = None) -> Tensor:
        """The part of one of our tensors that ``box`` names, in its stored dtype; what it takes goes into ``ledger``."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What the model is read from, as ``ledger`` knows it: stored tensors and their shapes."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of one of our tensors."""

    @abstractmethod
    def copy_description(self, folder: Path) -> None:
        """Put configuration, tokenizer and generation settings into ``folder``."""

    def whole(self, name: str) -> Box:
        """The box that is all of one of our tensors."""
        return Box.of_whole(name, self.rules[name].shape)

    def parts(self, name: str) -> list[tuple[Rule, Box]]:
        """The least parts of one of our tensors that are whole Hugging Face tensors, and the rule of each."""
        rule = self.rules[name]
        return [
            (part, Box(key=name, whole=rule.shape, offset=offset, shape=shape)) for part, offset, shape in rule.parts()
        ]


def read_config(path: Path) -> Mapping[str, Any]:
    """config.json of what ``path`` holds, without a look at the weights."""
    return open_source(path, weights=False).config


def open_source(path: Path, *, weights: bool = True) -> Source:
    """The source at ``path``; ModelError or WeightError, by name, for what is not one.

    Everything but the values of the weights is checked. Without ``weights`` only the configuration is wanted, and
    nothing else needs to be there.
    """
    source = _found(path)
    if weights:
        source.check()
    return source


def _found(path: Path) -> Source:
    from .gguf import GGUFSource

    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; name a Hugging Face folder, a GGUF file or a checkpoint")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model is a folder or a .gguf file")
        return GGUFSource(path)
    if (path / "model").is_dir():
        return CheckpointSource(path)
    if (path / "config.json").is_file():
        return HuggingFaceSource(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFSource(files[0])
    if files:
        raise ModelError(f"{path}: holds {len(files)} GGUF files; name one, as {files[0]}")
    raise ModelError(f"{path}: neither a Hugging Face folder (no config.json) nor a checkpoint (no model/)")


class HuggingFaceSource(Source):
    """A folder with config.json and safetensors files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json(path / "config.json")

    @cached_property
    def files(self) -> SafetensorsFolder:
        """The weight files, checked."""
        if not (self.path / INDEX).exists() and not (self.path / SINGLE).exists():
            if any(self.path.glob("*.bin")):
                raise WeightError(
                    f"{self.path}: its weights are pickled .bin files, which can run code; "
                    "load and save the model once with transformers to get safetensors"
                )
            raise WeightError(f"{self.path}: no {SINGLE} and no {INDEX}; the download is incomplete")
        return SafetensorsFolder(self.path)

    def check(self) -> None:
        shapes = {name: entry.shape for name, entry in self.files.entries.items() if not name.endswith(_BUFFERS)}
        # Some tied models store the embedding twice. Two that differ are two models.
        twice = self.arch.tied and shapes.pop(_LM_HEAD, None) is not None
        embedding = self.rules["embedding.word_embeddings.weight"].hf[0]
        if twice and not torch.equal(self.files.read(_LM_HEAD), self.files.read(embedding)):
            raise WeightError(
                f"{self.path}: config.json says tie_word_embeddings, but {_LM_HEAD} differs from {embedding}"
            )
        cover(self.rules, shapes)

    def read(self, box: Box, *, ledger: Ledger | None = None) -> Tensor:
        read = self.files.read if ledger is None else ledger.reading(self.files.read)
        return self.rules[box.key].pack(read, box.offset, box.shape)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {hf: rule.hf_shape(n) for rule in self.rules.values() for n, hf in enumerate(rule.hf)}

    def dtype(self, name: str) -> torch.dtype:
        return self.files.entries[self.rules[name].hf[0]].dtype

    def copy_description(self, folder: Path) -> None:
        _copy(self.path, folder)


class CheckpointSource(Source):
    """A checkpoint folder of this project: ``model/`` and ``hf/``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json(path / "hf" / "config.json")

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self.path / "model")

    @property
    def entries(self) -> Mapping[str, Any]:
        """Stored tensors by our name."""
        return self._shards.tensors

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
        read_manifest(self.path, hashes=False)

    def read(self, box: Box, *, ledger: Ledger | None = None) -> Tensor:
        tensor = torch.empty(box.shape, dtype=self.dtype(box.key))
        self._shards.load([(box, tensor)])
        if ledger is not None:
            ledger.used(box.key, box.offset[0], box.shape)
        return tensor

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: rule.shape for name, rule in self.rules.items()}

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
        elif (source / name).is_dir():
            shutil.copytree(source / name, folder / name)
