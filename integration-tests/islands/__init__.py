"""Sharded models in islands: their programs, and the same on whole models."""
