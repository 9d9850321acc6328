"""Builders that tests of several rooms share."""
