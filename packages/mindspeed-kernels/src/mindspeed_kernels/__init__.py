"""Devices (npu, cuda, cpu) behind one interface, fused operators with their references, the fp64 reference mode."""
