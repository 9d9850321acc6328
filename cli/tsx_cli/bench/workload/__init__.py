"""The workload: inputs, payloads, protocols."""
