"""The logs, log files and traces of the server process."""
