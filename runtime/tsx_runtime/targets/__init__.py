"""Where the runtime runs: a server of its own, and later the platforms."""
