"""What a user can put right about a model."""

from mindspeed_kernels.errors import UserError


class ModelError(UserError):
    """A model configuration that is not supported, or not understood."""


class WeightError(UserError):
    """Weight files that are damaged, incomplete, or not of the model that their configuration describes."""
