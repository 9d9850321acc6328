"""The web page: its routes, its state and its static files."""
