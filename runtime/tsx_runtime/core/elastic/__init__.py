"""The number of workers, adapted to the load within `minWorkers`, `maxWorkers` and memory."""
