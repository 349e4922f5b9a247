"""One vLLM engine in a process of its own, driven and measured over a pipe.

Benchmarks and the check of a GPU compare engines that differ in one setting, and vLLM keeps one
engine to a process. ``process`` is the driving side and needs no vLLM; ``engine`` is the other.
"""
