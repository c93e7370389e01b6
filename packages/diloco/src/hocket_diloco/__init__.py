"""DiLoCo and its family: ranks train alone, and outer parameters step by the ranks' mean distance from them.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv:2311.08105; A. Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512.

The outer step, the fragments and the merges are hocket-core's; this package has the methods as recipes.
"""
