"""What only a machine with a GPU can prove of kvtier, in two parts of under six minutes each."""
