"""The FSDP2 trainer: any transformers model, sharded by PyTorch's fully_shard."""
