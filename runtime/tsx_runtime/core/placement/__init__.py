"""Which worker runs on which device and which cores."""
