"""Comparisons of finished runs: their folders' contents, measures, groups over seeds, and a page."""
