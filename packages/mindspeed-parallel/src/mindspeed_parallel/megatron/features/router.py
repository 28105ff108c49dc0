"""Routing tokens to experts where Transformer Engine is not installed.

megatron-core's router asks ``te_general_gemm is not None``, a name that it binds only together with other names of
Transformer Engine: without that library the question itself raises NameError. The line is inside an autograd function
of the router, which no configuration field, spec or subclass reaches.
"""

import importlib.util

from mindspeed_runtime.patch import Feature, Patch

ROUTER = Feature(
    name="router",
    why="experts are routed where Transformer Engine is not installed",
    resort="the name is missing from a module; nothing but defining it there helps",
    patches=lambda _: [
        Patch(
            target="megatron.core.transformer.moe.moe_utils:te_general_gemm",
            make=lambda _: None,
            kind="define",
            why="the router compares this name with None, and without Transformer Engine it is not bound",
        )
    ],
    needed=lambda _: importlib.util.find_spec("transformer_engine") is None,
)
