"""Tasks to train and to compare strategies with: images, sequences of different lengths, a regression.

This module imports no torch.
"""
