"""`tsx plan`: how many replicas a load needs."""
