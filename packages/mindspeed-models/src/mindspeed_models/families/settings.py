"""A Hugging Face configuration, read key by key: what nobody read must not change the maths.

Values come from the transformers class of the model type, so that both spellings of a key and absent ones mean what
they mean there. A key of config.json that the family neither reads nor knows to be harmless is refused by name, unless
its value is the class's own default.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ModelError
from .arch import Rope

# Keys that say nothing about what the layers compute, by what they are for instead.
_BOOKKEEPING = (
    *("architectures", "model_type", "transformers_version", "auto_map", "is_llama_config"),
    *("unsloth_version", "unsloth_fixed", "transformers.js_config"),
)
_STORAGE = ("torch_dtype", "dtype")  # the dtype of each tensor is read from its file
_EXECUTION = ("attn_implementation", "use_cache", "output_attentions", "output_hidden_states", "return_dict")
_EXECUTION += ("chunk_size_feed_forward",)  # memory only, and not read by decoders
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id")
_GENERATION = ("temperature", "top_p", "top_k", "do_sample", "max_length", "min_length")
_OTHER_HEADS = ("id2label", "label2id", "problem_type")  # of classifiers
_FRESH_WEIGHTS = ("initializer_range",)
HARMLESS = frozenset(_BOOKKEEPING + _STORAGE + _EXECUTION + _TOKENS + _GENERATION + _OTHER_HEADS + _FRESH_WEIGHTS)
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_SPELLINGS = ("rope_parameters", "rope_theta", "rope_scaling")


# Model types of code that travels with the weights, and the class of transformers that is the same graph.
SAME_AS = {"kimi_k2": "deepseek_v3"}


def transformers_config(raw: Mapping[str, Any]) -> Any:
    """The configuration as an object of transformers."""
    from transformers import AutoConfig

    kind = str(raw.get("model_type"))
    return AutoConfig.for_model(**{**_decoded(raw), "model_type": SAME_AS.get(kind, kind)})


def _decoded(value: Any) -> Any:
    """Numbers that JSON lacks: transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


class Settings:
    """The keys of one configuration."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """``raw``: config.json as a mapping. ModelError when its model type is unknown to transformers."""
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.raw: dict[str, Any] = _decoded(raw)
        self.model_type = str(raw.get("model_type"))
        known = SAME_AS.get(self.model_type, self.model_type)
        if known not in CONFIG_MAPPING:
            raise ModelError(f"config.json: model_type {self.model_type!r} is not known")
        kind = CONFIG_MAPPING[known]
        try:
            self._values = transformers_config(self.raw).to_dict()
        except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
            reason = " ".join(str(error.args[0] if error.args else error).split())
            raise ModelError(f"config.json: not a valid {self.model_type} configuration: {reason}") from error
        self._defaults = kind().to_dict()
        self._aliases: Mapping[str, str] = kind.attribute_map
        self._read: set[str] = set()

    def take(self, key: str) -> Any:
        """The value of ``key`` as transformers understands it."""
        name = self._named(key)
        self._read.add(name)
        if name not in self._values:
            raise ModelError(f"config.json: {key} is missing")
        return self._values[name]

    def take_or(self, key: str, default: Any) -> Any:
        """The value of a key that the class may not have at all, or ``default``; null counts as absent."""
        name = self._named(key)
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def _named(self, key: str) -> str:
        """The name under which transformers keeps a key that has two."""
        return self._aliases.get(key, key)

    def expect(self, key: str, *allowed: Any) -> Any:
        """The value of ``key``, which must be one of ``allowed``."""
        value = self.take_or(key, allowed[0])
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ModelError(f"config.json: {key}={value!r} is not supported for {self.model_type}; only {names}")
        return value

    def harmless(self, *keys: str) -> None:
        """These keys do not change what the model computes."""
        self._read.update(map(self._named, keys))

    def ropes(self) -> tuple[Rope, Rope]:
        """Rotary embeddings of layers without a window and of those with one, where they differ by layer type."""
        self._read.update((*_ROPE_SPELLINGS, "rope_local_base_freq"))
        given = dict(self.take("rope_parameters"))
        kinds = ("full_attention", "sliding_attention")
        if set(given) != set(kinds):
            raise ModelError(f"config.json: rope_parameters must be of {' and '.join(kinds)} for {self.model_type}")
        full, sliding = (self._rope(dict(given[kind]), partial=False, interleaved=False) for kind in kinds)
        return full, sliding

    def rope(self, *, partial: bool = False, interleaved: bool = False) -> Rope:
        """Rotary embedding, from either spelling. Kinds that are not built here are refused by name.

        ``partial``: the model type may turn a share of each head alone. ``interleaved``: its pairs are neighbours.
        """
        self._read.update(_ROPE_SPELLINGS)
        spelled = [self.raw[key] for key in ("rope_parameters", "rope_scaling") if self.raw.get(key)]
        if len(spelled) == 2 and spelled[0] != spelled[1]:
            raise ModelError("config.json: rope_parameters and rope_scaling contradict one another; keep the right one")
        given = dict(self.take("rope_parameters"))
        if "rope_theta" not in given:
            raise ModelError(
                f"config.json: rope_parameters of its own for each layer type ({', '.join(given)}) are not supported "
                f"for {self.model_type}"
            )
        theta = _number("rope_theta", given["rope_theta"])
        if self.raw.get("rope_theta") not in (None, theta):
            raise ModelError(
                f"config.json: rope_theta={self.raw['rope_theta']!r} contradicts rope_parameters, which mean {theta:g}; "
                "keep the one that is right"
            )
        return self._rope(given, partial=partial, interleaved=interleaved)

    def _rope(self, given: dict[str, Any], *, partial: bool, interleaved: bool) -> Rope:
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        theta = _number("rope_theta", given.pop("rope_theta"))
        fields: dict[str, Any] = {"theta": theta, "kind": kind}
        if kind not in _ROPE_KINDS:
            raise ModelError(
                f"config.json: rope_type {kind!r} is not supported for {self.model_type}; there are "
                f"{', '.join(_ROPE_KINDS)}"
            )
        try:
            fields |= self._stretch(kind, given)
        except KeyError as error:
            raise ModelError(f"config.json: rope_type {kind!r} needs rope_parameters.{error.args[0]}") from error
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json: rope_parameters of rope_type {kind!r}: {error}") from error
        share = _number("partial_rotary_factor", given.pop("partial_rotary_factor", 1.0))
        if partial:
            self._read.add("partial_rotary_factor")
        elif share != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor is not supported for {self.model_type}")
        if given:
            raise ModelError(f"config.json: rope_parameters.{min(given)} is not understood with rope_type {kind!r}")
        return Rope(**fields, share=share, interleaved=interleaved)

    def sharpness_of_all(self) -> float:
        """What mscale_all_dim of a stretched rotary embedding makes of the scores, once for queries, once for keys."""
        given = self.take("rope_parameters")
        weight = given.get("mscale_all_dim") or 0
        return _yarn_scale(_number("factor", given["factor"]), weight) if weight else 1.0

    def _stretch(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """Take what ``kind`` reads of ``given``. KeyError for a key that it lacks."""
        fields: dict[str, Any] = {}
        longest = self.take("max_position_embeddings")
        original = longest
        if kind in ("llama3", "yarn", "longrope"):
            original = int(given.pop("original_max_position_embeddings"))
            fields["original_max_positions"] = original
        if kind == "dynamic":
            fields["original_max_positions"] = longest
        if kind in ("yarn", "longrope"):  # null or absent: as far as the context was stretched
            factor = given.pop("factor", None)
            fields["factor"] = longest / max(original, 1) if factor is None else _number("factor", factor)
        elif kind != "default":
            fields["factor"] = _number("factor", given.pop("factor"))
        if kind == "llama3":
            for key in ("low_freq_factor", "high_freq_factor"):
                fields[key] = _number(key, given.pop(key))
        if kind == "yarn":
            fields |= _yarn(given, fields["factor"])
        if kind == "longrope":
            fields |= _longrope(given, original, fields["factor"])
        return fields

    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, from ``layer_types`` and ``sliding_window``."""
        kinds = self.take("layer_types")
        self.harmless("use_sliding_window", "max_window_layers")  # transformers has put them into layer_types
        window = self.take_or("sliding_window", None)
        if window is None and "sliding_attention" in kinds:
            raise ModelError(
                "config.json: layer_types has sliding_attention, but there is no sliding_window in force "
                "(use_sliding_window may be false)"
            )
        found = []
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelError(f"config.json: layer_types has {kind!r}; only full_attention and sliding_attention")
            found.append(window if kind == "sliding_attention" else None)
        return tuple(found) if any(found) else ()

    def one_window(self, num_layers: int) -> tuple[int | None, ...]:
        """The same sliding window for every layer, or none where ``sliding_window`` is null."""
        window = self.take_or("sliding_window", None)
        return () if window is None else (window,) * num_layers

    def finish(self) -> None:
        """ModelError for the first key that nobody read, that is not harmless, and that is not at its default."""
        if self.raw.get("quantization_config"):
            raise ModelError(
                "config.json: quantization_config says that the weights are quantised; dequantise them with "
                "transformers and save the model again"
            )
        for key, value in self.raw.items():
            name = self._named(key)
            if name in self._read or name in HARMLESS or name.startswith("_"):
                continue
            if self._defaults.get(name, _ABSENT) == value:
                continue
            raise ModelError(
                f"config.json: {key}={value!r} is not known to family {self.model_type} and may change what the model "
                "computes; remove it if it does not"
            )


def _yarn(given: dict[str, Any], factor: float) -> dict[str, Any]:
    """Take YaRN's own keys. Null counts as absent, as it does in transformers."""
    found: dict[str, Any] = {"truncate": bool(given.pop("truncate", True))}
    for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        found[key] = _number(key, given.pop(key, None) or default)
    scale, scale_of_all = (_number(key, given.pop(key, None) or 0) for key in ("mscale", "mscale_all_dim"))
    attention = given.pop("attention_factor", None)
    if attention is None and scale and scale_of_all:
        attention = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_of_all)
    found["attention_factor"] = _yarn_scale(factor) if attention is None else _number("attention_factor", attention)
    return found


def _longrope(given: dict[str, Any], original: int, factor: float) -> dict[str, Any]:
    """Take LongRoPE's own keys (Ding et al., 2024)."""
    attention = given.pop("attention_factor", None)
    if attention is None:
        sharper = factor > 1 and original > 1  # a context of one token is refused later, by name
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if sharper else 1.0
    found: dict[str, Any] = {"attention_factor": _number("attention_factor", attention)}
    for key in ("short_factor", "long_factor"):
        values = given.pop(key)
        if not isinstance(values, list):
            raise ValueError(f"{key} is {values!r}; it must be a list of numbers")
        found[key] = tuple(_number(key, value) for value in values)
    return found


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(f"config.json: {key} is {value!r}; it must be a number")
    return float(value)


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    """How much sharper attention must be over a context of ``factor`` times the length (YaRN, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_ABSENT = object()
