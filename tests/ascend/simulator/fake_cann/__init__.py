"""The genuine torch_npu over a CANN of our own, on a machine without an NPU.

Real: torch_npu's Python layer, operator schemas, host checks, autograd nodes, allocator, generators and
ProcessGroupHCCL. Ours: the ACL runtime (``acl.cpp``, device memory is host memory), the transport of HCCL (``hccl.cpp``,
sockets of this machine) and the kernels (``kernels.cpp``, PyTorch's for the CPU; ``opapi.cpp``, those of CANN's fused
operators that are used here). What is not simulated raises. docs/guides/simulated-ascend.md says what this proves.
"""
