"""Parallel algorithms: meshes, context and expert parallelism; megatron-core's groups, layer specs and features."""
