"""Mistral and Magistral: no biases, one sliding window for all layers or none."""

from .arch import Arch
from .decoder import decoder_fields, decoder_rules
from .family import Family
from .settings import Settings


def arch(settings: Settings) -> Arch:
    """A null sliding_window means none."""
    fields = decoder_fields(settings, "mistral")
    return Arch(**fields, windows=settings.one_window(fields["num_layers"]))


MISTRAL = Family(name="mistral", model_types=("mistral",), arch=arch, rules=decoder_rules)
