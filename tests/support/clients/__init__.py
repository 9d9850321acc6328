"""Clients that send exactly the bytes that a test gives them."""
