"""Asynchronous answers: requests that are stored, answered later, and fetched or sent to a
callback.
"""
