"""Models as Lambda functions: clients of the Runtime API, events, results."""
