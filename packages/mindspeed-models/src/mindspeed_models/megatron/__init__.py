"""Models of megatron-core, built from a family's description and filled from checkpoints or Hugging Face weights."""
