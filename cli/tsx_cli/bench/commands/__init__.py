"""The commands of `tsx bench` and how a run proceeds."""
