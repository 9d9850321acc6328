"""The HTTP server: the fast lane for predictions, the routes of every API, the web page."""
