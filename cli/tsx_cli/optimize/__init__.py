"""The command `tsx optimize`.

It builds other forms of a model, proves that they answer right, measures them, and keeps the best.
"""
