"""What lets tokens see one another, in numbers: the mixers that are not plain attention. Free of any framework."""

from dataclasses import dataclass, fields

from mindspeed_kernels.errors import UserError


class MixerError(UserError):
    """A mixer whose numbers do not fit together."""


class _Sizes:
    """Every whole number but those that may be 0 is at least 1."""

    def __post_init__(self) -> None:
        for item in fields(self):  # pyright: ignore[reportArgumentType]  its subclasses are dataclasses
            value = getattr(self, item.name)
            if type(value) is int and value < item.metadata.get("least", 1):
                raise MixerError(f"{self._name()}: {item.name} is {value}; it must be at least 1")
        self._check()

    def _check(self) -> None:
        """What the numbers must be to one another."""

    def _must_divide(self, what: str, number: int, into: int, parts: str) -> None:
        if number % into:
            raise MixerError(f"{self._name()}: {number} {what} do not divide into {into} {parts}")

    def _name(self) -> str:
        return (self.__doc__ or "").split(" (")[0].split(":")[0]


@dataclass(frozen=True, kw_only=True)
class Latent(_Sizes):
    """Multi-head latent attention (DeepSeek-V2, 2024): queries, keys and values come from narrow latents."""

    q_rank: int | None  # width of the latent of queries; None: they come from the hidden states
    kv_rank: int  # of keys and values
    plain: int  # dimensions of a query or key head that are not turned
    turned: int  # dimensions that are; of keys, all heads share them
    value: int  # dimensions of a value head
    norm_eps: float  # of the norms of the latents
    bias: bool = False  # of the projections to the latents


@dataclass(frozen=True, kw_only=True)
class Delta(_Sizes):
    """Gated delta network (Yang et al., 2024): linear attention whose state is overwritten key by key."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # tokens that the convolution before it sees

    def _check(self) -> None:
        self._must_divide("value heads", self.value_heads, self.key_heads, "key heads")


@dataclass(frozen=True, kw_only=True)
class Ssm(_Sizes):
    """State space of Mamba-2 (Dao and Gu, 2024)."""

    heads: int
    head_dim: int
    groups: int  # heads of a group share B and C
    state: int  # numbers that each dimension of a head remembers
    conv: int  # tokens that the convolution before it sees
    conv_bias: bool = True
    bias: bool = False  # of the projections
    step_limits: tuple[float, float] = (0.0, float("inf"))  # of the step of each head

    def _check(self) -> None:
        self._must_divide("heads", self.heads, self.groups, "groups")
