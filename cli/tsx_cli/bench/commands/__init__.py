"""The commands of `tsx bench`, and the steps of a run."""
