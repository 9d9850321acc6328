"""The load generator: a separate process that sends requests by a plan and reports the results."""
