"""What this project adds to megatron-core: groups, layers chosen by spec, and the only patches."""
