"""The settings of the server, and the origins of their values."""
