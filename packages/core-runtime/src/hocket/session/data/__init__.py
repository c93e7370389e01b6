"""Batches: the loop over them, passes, positions in loaders, and the ranks' agreement on batches."""
