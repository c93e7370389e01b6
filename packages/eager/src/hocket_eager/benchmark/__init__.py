"""The paper's microbenchmark, which `hocket bench` runs."""
