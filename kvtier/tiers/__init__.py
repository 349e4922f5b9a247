"""Where bytes lie: blocking storage for blocks, one module per tier."""
