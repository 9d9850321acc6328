"""The command `tsx optimize`.

It builds other forms of a model, proves that they answer right, measures them, and keeps the best.
"""

POSITION = 40
SUMMARY = "Find the fastest form of a model that still answers right, and keep it in the archive."
