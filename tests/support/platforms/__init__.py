"""Doubles of platforms, which speak their documented protocols."""
