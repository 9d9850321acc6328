"""The way of a request from the queue to a batch on a worker's channel."""
