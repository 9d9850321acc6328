"""Configurations, results and the arithmetic on them."""
