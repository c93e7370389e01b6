"""Training programs as people write them, each of which runs with or without Hocket: see `test_idioms.py`."""
