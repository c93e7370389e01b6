"""Outer steps and merges: the use of the ranks' progress in an exchange of parameters."""
