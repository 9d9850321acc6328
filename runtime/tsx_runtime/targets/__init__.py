"""Where the runtime runs: a server of its own."""
