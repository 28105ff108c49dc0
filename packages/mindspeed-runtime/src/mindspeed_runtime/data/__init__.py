"""From files to batches: sources, token stores, packing, the global order, the loader."""
