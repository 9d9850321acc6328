"""`tsx bench`: finds the best configuration of a model within a latency bound by measuring, and
saves it.
"""
