"""Operators through torch_npu. Each module imports it when it is called for; nothing here runs without an NPU."""
