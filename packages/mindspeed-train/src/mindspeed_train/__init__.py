"""The Megatron trainer: pre-training and fine-tuning in every parallel layout, with proofs."""

PRELOAD = ("mindspeed_train.preload",)  # imported once, before rank processes are made
