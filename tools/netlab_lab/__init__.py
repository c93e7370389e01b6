"""What `tools/netlab` is made of: standard library only, so that it runs before and without `.venv`."""
