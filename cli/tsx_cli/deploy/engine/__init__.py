"""Plan and apply: compare what is there with what is wanted, and change it."""
