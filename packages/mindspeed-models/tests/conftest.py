from mindspeed_runtime.testing import pool  # noqa: F401
