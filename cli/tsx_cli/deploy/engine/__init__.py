"""Plan and apply: comparing the current state with the specification, and changing it."""
