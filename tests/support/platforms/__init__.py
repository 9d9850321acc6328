"""Doubles of platforms that implement their documented protocols."""
