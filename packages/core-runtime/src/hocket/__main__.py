"""`python -m hocket`."""

from hocket.cli.main import main

main()
