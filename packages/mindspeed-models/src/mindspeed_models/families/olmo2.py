"""OLMo 2: norms behind attention and MLP and none before them; queries and keys normed over all heads together."""

from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """attention_bias, off in the published models, puts a bias on q, k, v and o."""
    return Arch(
        **decoder_fields(settings, "olmo2"),
        **attention_biases(settings),
        qk_norm="wide",
        norm_rounds_last=True,
        pre_norms=False,
        post_norms=True,
    )


def rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with the names of the two norms."""
    return decoder_rules(arch, Names(post_attention="post_attention_layernorm", post_mlp="post_feedforward_layernorm"))


OLMO2 = Family(name="olmo2", model_types=("olmo2",), arch=arch, rules=rules)
