"""Forms of a model: other ways to run it, built from it by `tsx optimize`, kept in its archive,
loaded by its workers.
"""
