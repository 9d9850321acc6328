"""Commands that send requests: predict, replay, explain, slowest."""
