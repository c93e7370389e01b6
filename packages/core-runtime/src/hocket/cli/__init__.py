"""The command line: run, plan, plugins, doctor."""
