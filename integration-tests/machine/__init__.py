"""A machine that looks for sequences of moves after which a session is wrong: see `test_machine.py`."""
