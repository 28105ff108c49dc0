"""The Megatron trainer: pre-training and fine-tuning in every parallel layout, with proofs."""
