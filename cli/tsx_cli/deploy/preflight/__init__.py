"""What is checked before a deployment: limits, prices, credentials."""
