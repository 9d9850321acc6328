"""The load of a benchmark: inputs, protocols, the load generator and results.json."""
