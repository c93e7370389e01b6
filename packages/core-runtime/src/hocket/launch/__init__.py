"""The start of jobs: launchers, ranks on this host and on others, and how a process joins its job."""
