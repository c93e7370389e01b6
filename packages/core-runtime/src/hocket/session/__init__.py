"""A strategy attached to a model and an optimizer, step by step."""
