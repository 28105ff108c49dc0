"""Named models: configurations, published sizes, and where both are from. Data, checked by arithmetic."""

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError

_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class CatalogModel:
    """A published model."""

    name: str
    hf: str  # repository on the Hugging Face hub
    family: str
    parameters: str  # as published: 8.2B
    count: str  # where that is published
    context: int  # tokens
    tokenizer: str  # bpe, sentencepiece or tekken
    licence: str
    config: Mapping[str, Any]  # config.json, what the model computes by

    @property
    def published(self) -> float:
        """The published number of parameters."""
        return float(self.parameters[:-1]) * _UNITS[self.parameters[-1]]

    @property
    def tolerance(self) -> float:
        """How far a count may be from it: half a unit of its last digit, or 1%, whichever is more."""
        digits = len(self.parameters[:-1].partition(".")[2])
        return max(0.5 * 10**-digits * _UNITS[self.parameters[-1]], 0.01 * self.published)

    @property
    def config_source(self) -> str:
        """Where the configuration is from."""
        return f"config.json of https://huggingface.co/{self.hf}"


@functools.cache
def catalog() -> Mapping[str, CatalogModel]:
    """Every named model by name, in the order of the file."""
    import yaml

    text = (importlib.resources.files(__name__) / "models.yaml").read_text()
    found: dict[str, CatalogModel] = {}
    for entry in yaml.safe_load(text):
        like = found.get(entry.pop("like", ""))
        fields = (
            {} if like is None else {key: getattr(like, key) for key in ("family", "context", "tokenizer", "licence")}
        )
        own = entry.pop("config", None) or {}
        base = {"model_type": entry.get("family")} if like is None else dict(like.config)
        found[entry["name"]] = CatalogModel(**{**fields, **entry}, config={**base, **own})
    return found


def named(name: str) -> CatalogModel:
    """A model by name. ModelError, with the nearest names, for one that is not there."""
    import difflib

    models = catalog()
    if name in models:
        return models[name]
    close = difflib.get_close_matches(name.lower(), models, n=3) or [key for key in models if name.lower() in key][:3]
    hint = f"did you mean {', '.join(close)}?" if close else "`mindspeed-train models` lists them"
    raise ModelError(f"model {name!r} is not in the catalog; {hint}")
