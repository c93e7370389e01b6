"""Lanes on devices, beside those of any ranks that are processes."""
