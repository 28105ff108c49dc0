"""SmolLM3: Llama with layers that know no positions (Yang et al., 2025: RoPE to NoPE and back again)."""

from .arch import Arch
from .decoder import attention_biases, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """no_rope_layers has a 1 for each layer that is turned, in spite of its name."""
    settings.harmless("no_rope_layer_interval")  # transformers has put it into no_rope_layers
    fields = decoder_fields(settings, "smollm3")
    turned = settings.take("no_rope_layers")
    return Arch(
        **fields,
        **attention_biases(settings),
        mlp_bias=bool(settings.take("mlp_bias")),
        windows=settings.windows(),
        unturned=tuple(layer for layer, is_turned in enumerate(turned) if not is_turned),
    )


SMOLLM3 = Family(name="smollm3", model_types=("smollm3",), arch=arch, rules=decoder_rules)
