"""Lambda functions: the runtime client, events, results."""
