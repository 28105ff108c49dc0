"""Imports that take seconds, made once before rank processes are: megatron-core, torch_npu where it is installed, ours.

megatron-core says at import which CUDA libraries it does without; on other devices that is not news.
"""

import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import mindspeed_parallel.megatron.decoder
    import mindspeed_parallel.megatron.layers
    import transformers
    import transformers.models.auto.modeling_auto
    from mindspeed_kernels.device import import_npu

    from . import observe, rank

    import_npu()
    logging.disable(logging.NOTSET)

__all__ = ["megatron", "mindspeed_parallel", "observe", "rank", "transformers"]
