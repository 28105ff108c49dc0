"""Recipes, data, the training loop, checkpoints and command lines: what every backend shares, free of any framework."""
