"""The statistics of monitoring, for the monitor process and for offline commands."""
