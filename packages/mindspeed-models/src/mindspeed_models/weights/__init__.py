"""Weights: names, layout, placement, storage, conversion."""
