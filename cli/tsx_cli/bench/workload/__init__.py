"""What is sent: inputs, payloads, protocols."""
