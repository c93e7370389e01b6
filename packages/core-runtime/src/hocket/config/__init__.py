"""Configuration: YAML, recipes, mappings and overrides become checked dataclasses.

`document` merges and remembers the source of each value, `source` reads, `schema` and `component` check and
build, `run` loads a run's file. Every mistake is a ConfigError that names source, key, what was given and
what is allowed.
"""
