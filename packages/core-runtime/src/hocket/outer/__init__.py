"""Outer steps and merges: what an exchange of parameters makes of what the ranks' steps have come to."""
