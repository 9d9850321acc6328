"""The web page: its routes, its data and its static files."""
