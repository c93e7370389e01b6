"""Configuration: YAML, recipes, mappings and overrides become checked dataclasses.

`document` merges and remembers where each value came from, `source` reads, `schema` and `component` check and
build, `run` loads a run's file. Every mistake is a ConfigError that names source, key, what was given and
what is allowed.
"""
