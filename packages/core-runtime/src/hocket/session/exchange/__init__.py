"""Exchanges while they are open: phases, channels, parameters, outer parameters, and equal replicas."""
