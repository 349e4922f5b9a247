"""kvtier-inspect: look into a store, ask what a cache is worth, move blocks, without an engine."""
