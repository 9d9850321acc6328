"""From a queued request to a batch on a worker's channel."""
