"""The load generator: a process of its own that asks a server as a plan says, and tells what came of it."""
