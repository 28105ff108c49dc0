"""Phi-3 and Phi-3.5: queries, keys and values in one matrix, gate and up in another, LongRoPE."""

from ..weights.rule import Rule
from .arch import Arch
from .decoder import Names, decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """One sliding window for all layers, or none."""
    settings.harmless("embd_pdrop")  # without effect in transformers 5
    settings.harmless("original_max_position_embeddings")  # transformers has put it into rope_parameters
    settings.expect("resid_pdrop", 0.0)
    fields = decoder_fields(settings, "phi3", rope=settings.rope(partial=True))
    return Arch(**fields, windows=settings.one_window(fields["num_layers"]))


def rules(arch: Arch) -> tuple[Rule, ...]:
    """Llama's, with the joined matrices."""
    return decoder_rules(arch, Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)))


PHI3 = Family(name="phi3", model_types=("phi3",), arch=arch, rules=rules)
