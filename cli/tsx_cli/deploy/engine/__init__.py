"""Plan and apply: compare the current state with the specification, and change it."""
