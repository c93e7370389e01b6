"""Plans: the buffers, bytes, seconds and memory of a strategy's exchanges, computed from names and shapes alone."""
