"""Plan and apply: the comparison of the current state with the specification, and its changes."""
