"""The parts of `tools/netlab`: standard library only, so that it runs before and without `.venv`."""
