"""Logs, log files and traces of the server process."""
