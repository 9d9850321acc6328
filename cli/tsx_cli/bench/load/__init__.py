"""What a benchmark sends, and the figures of it: inputs, protocols, the load generator, results.json."""
