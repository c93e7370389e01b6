"""Comparisons of finished runs: what their folders hold, as measures, groups over seeds, and a page."""
