"""Operators: one module a family, each with its definition in plain PyTorch and a table of faster implementations."""
