"""What a decoder is made of, in numbers and switches: all that building, converting and planning need to know."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from mindspeed_kernels.ops.routing import Choice
from mindspeed_parallel.mixers import Delta, Latent, Ssm

from ..errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and how it is stretched to longer contexts."""

    theta: float
    share: float = 1.0  # of each head's dimensions, the first ones are turned
    interleaved: bool = False  # pairs are neighbours (2 i, 2 i + 1), not halves (i, i + D / 2)
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0  # the context before it was stretched; dynamic: the longest that is not
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: pairs that turn more often within the original context are kept
    beta_slow: float = 1.0  # yarn: pairs that turn less often are stretched by the whole factor
    truncate: bool = True  # yarn: the bounds between them are whole pairs
    attention_factor: float = 1.0  # yarn, longrope: scales cosines and sines
    short_factor: tuple[float, ...] = ()  # longrope: divides the frequency of each pair, within the original context
    long_factor: tuple[float, ...] = ()  # longrope: the same, in rows that are longer

    def __post_init__(self) -> None:
        self._must(0 < self.share <= 1, f"partial_rotary_factor {self.share:g} must be above 0 and at most 1")
        self._must(self.theta > 1, f"theta {self.theta:g} must be above 1")
        self._must(self.factor > 0, f"factor {self.factor:g} must be above 0")
        self._must(self.attention_factor > 0, f"attention_factor {self.attention_factor:g} must be above 0")
        if self.kind not in ("default", "linear"):
            least = 2 if self.kind == "longrope" else 1  # the logarithm of it divides
            given = f"({self.original_max_positions})"
            self._must(
                self.original_max_positions >= least,
                f"{self.kind} needs the length of the original context {given}, at least {least}",
            )
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            self._must(0 < low < high, f"llama3 needs 0 < low_freq_factor ({low:g}) < high_freq_factor ({high:g})")
        if self.kind == "yarn":
            slow, fast = self.beta_slow, self.beta_fast
            self._must(0 < slow <= fast, f"yarn needs 0 < beta_slow ({slow:g}) <= beta_fast ({fast:g})")
        above = all(value > 0 for value in (*self.short_factor, *self.long_factor))
        self._must(above, "every short_factor and long_factor must be above 0")

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise ModelError(f"rotary embedding: {what}")

    def width(self, head_dim: int) -> int:
        """Dimensions of a head that are turned."""
        return int(head_dim * self.share)

    def check_width(self, head_dim: int) -> None:
        """ModelError unless heads of ``head_dim`` can be turned."""
        dim = self.width(head_dim)
        shown = f"head_dim {head_dim}" if dim == head_dim else f"{dim} of {head_dim} dimensions of a head"
        self._must(dim >= 2 and dim % 2 == 0, f"{shown} cannot be turned in pairs")
        self._must(self.kind != "dynamic" or dim >= 4, f"dynamic needs a head_dim of at least 4, not {dim}")
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                count = len(getattr(self, name))
                self._must(count == dim // 2, f"{name} has {count} values for {dim // 2} pairs")

    def inverse_frequencies(self, dim: int, *, long: bool = False) -> list[float]:
        """Radians a position for each of the ``dim / 2`` pairs.

        longrope has other ones in rows that are longer than the original context: ``long``. Those of dynamic grow with
        the row from there on (``mindspeed_parallel.megatron.rotary``); these are the ones below.
        """
        plain = [self.theta ** -(2 * pair / dim) for pair in range(dim // 2)]
        if self.kind == "longrope":
            divisors = self.long_factor if long else self.short_factor
            return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in plain]
        if self.kind == "yarn":
            low, high = self._yarn_range(dim)
            share = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(dim // 2)]
            return [f * (1 - part) + f / self.factor * part for f, part in zip(plain, share, strict=True)]
        return [self._llama3(frequency) for frequency in plain] if self.kind == "llama3" else plain

    def _yarn_range(self, dim: int) -> tuple[float, float]:
        """YaRN (Peng et al., 2023): the pairs between which stretching sets in."""
        bounds = [
            dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.beta_fast, self.beta_slow)
        ]
        if self.truncate:
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
        return low, high + 0.001 if low == high else high

    def _llama3(self, frequency: float) -> float:
        """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
        wavelength = 2 * math.pi / frequency
        if wavelength < self.original_max_positions / self.high_freq_factor:
            return frequency
        if wavelength > self.original_max_positions / self.low_freq_factor:
            return frequency / self.factor
        kept = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, kw_only=True)
class Moe:
    """A mixture of experts (Shazeer et al., 2017) where some layers would have one MLP.

    A router scores all experts for a token; the ``top_k`` best compute it, and what they give is summed by weight.
    """

    layers: tuple[int, ...]  # that have experts; the others have the MLP
    num_experts: int
    top_k: int
    ffn: int  # width of an expert
    shared_ffn: int = 0  # width of the expert that computes every token; 0: there is none
    shared_gate: bool = False  # what it gives is multiplied by the sigmoid of a number that depends on the token
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    normalised: bool = True  # the weights of the chosen experts add up to 1
    scale: float = 1.0  # of the weights, after that
    bias: bool = False  # a number for each expert, not trained, that is added to its score in choosing alone
    groups: int = 1  # experts are chosen within the best groups
    top_groups: int = 1
    group_score: Literal["top2", "best"] = "top2"  # of a group: the sum of its two best scores, or its best
    wide: bool = False  # the router computes in float32 at least
    biased: bool = False  # the router and the experts have biases that are trained

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn", "groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ModelError(f"experts: {name} is {getattr(self, name)}; it must be at least 1")
        self._must(self.num_experts % self.groups == 0, f"{self.num_experts} do not divide into {self.groups} groups")
        self._must(
            self.top_groups <= self.groups, f"the best {self.top_groups} of {self.groups} groups cannot be taken"
        )
        each = self.num_experts // self.groups
        self._must(
            self.top_k <= each * self.top_groups,
            f"{self.top_k} of {each * self.top_groups} cannot be chosen for a token",
        )
        if self.groups > 1 and self.group_score == "top2":
            self._must(each >= 2, f"a group of {each} has no two best scores")

    def choice(self) -> Choice:
        """What the operator that chooses must know."""
        return Choice(**{item.name: getattr(self, item.name) for item in fields(Choice)})

    def _must(self, holds: bool, what: str) -> None:
        if not holds:
            raise ModelError(f"experts: {what}")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A decoder: layers of a mixer (attention, or one with a state) and a gated MLP or experts, with RMSNorm."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int = 0  # of attention, where a layer has it
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0  # of the MLPs
    vocab: int  # true size, without padding
    max_positions: int
    norm_eps: float
    rope: Rope | None = None  # None: positions are not told
    tied: bool  # the output layer is the embedding
    output_gate: bool = False  # what attention gives is multiplied by the sigmoid of a gate beside each query
    recurrent: tuple[int, ...] = ()  # layers whose mixer is delta or ssm
    delta: Delta | None = None
    ssm: Ssm | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "wide"] = "none"  # RMSNorm of queries and keys: each head alone, or all together
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, itself counted; empty: no layer has one
    unturned: tuple[int, ...] = ()  # layers without rotary embedding
    local_rope: Rope | None = None  # that of layers with a window; None: the same
    activation: Literal["swiglu", "geglu", "clamped_swiglu"] = "swiglu"
    activation_options: tuple[tuple[str, float], ...] = ()  # numbers of it, by name
    has_sinks: bool = False  # attention has a key without a value for each head
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0  # what the embedding of a token is multiplied by
    norm_rounds_last: bool = False  # norms multiply by their weight before they round
    residual_scale: float = 1.0  # what attention and MLP add is multiplied by
    head_scale: float = 1.0  # what goes into the output layer is multiplied by
    attention_cap: float | None = None  # scores s of attention become cap * tanh(s / cap)
    logit_cap: float | None = None  # and logits
    pre_norms: bool = True  # RMSNorm of what goes into attention and MLP
    post_norms: bool = False  # RMSNorm of what they add
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0  # of what attention and MLP add
    attention_scale: float | None = None  # of the products of queries and keys; None: the root of head_dim divides them
    latent: Latent | None = None  # attention over latents in every layer; head_dim is of queries and keys
    moe: Moe | None = None  # experts in some layers
    has_mlps: bool = True  # in layers without experts

    def __post_init__(self) -> None:
        self._at_least_one("num_layers", "hidden", "vocab", "max_positions")
        if self.mlp_layers:
            self._at_least_one("ffn")
        if self.attention_layers:
            self._check_attention()
        if self.norm_eps <= 0:
            raise ModelError(f"{self.family}: norm_eps {self.norm_eps} must be above 0")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"{self.family}: {len(self.windows)} sliding windows for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError(f"{self.family}: a sliding window of less than one token in {self.windows}")
        if self.moe is not None and not set(self.moe.layers) <= set(range(self.num_layers)):
            raise ModelError(f"{self.family}: experts in layers {self.moe.layers} of {self.num_layers}")

    def _check_attention(self) -> None:
        self._at_least_one("num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.family}: {self.num_heads} query heads do not divide into {self.num_kv_heads} kv heads"
            )
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.check_width(self.head_dim if self.latent is None else self.latent.turned)

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ModelError(f"{self.family}: {name} is {getattr(self, name)}; it must be at least 1")

    def mixer(self, layer: int) -> Literal["attention", "latent", "delta", "mamba"]:
        """What lets tokens see one another in a layer."""
        if layer in self.recurrent:
            return "mamba" if self.delta is None else "delta"
        return "attention" if self.latent is None else "latent"

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose mixer is attention, over latents or not."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.recurrent)

    @property
    def turned(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        assert self.rope is not None
        return self.rope.width(self.head_dim) if self.latent is None else self.latent.turned

    @property
    def value_rows(self) -> int:
        """Width of what all heads give."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers that have experts."""
        return () if self.moe is None else self.moe.layers

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """Layers that have one MLP."""
        if not self.has_mlps:
            return ()
        return tuple(layer for layer in range(self.num_layers) if layer not in self.expert_layers)

    @property
    def query_rows(self) -> int:
        """Width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Width of all keys, and of all values."""
        return self.num_kv_heads * self.head_dim
