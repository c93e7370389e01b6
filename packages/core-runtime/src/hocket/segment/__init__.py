"""Segments: the flat buffers that parameters and gradients are views of, and how a model is cut into them."""
