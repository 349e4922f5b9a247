"""Demo of kvtier on a small real model; its model and its text serve tests and benchmarks too."""
