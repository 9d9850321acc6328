"""The commands of `tsx bench` and the course of a run."""
