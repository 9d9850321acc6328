"""Whether a form's answers are as right as the reference's: metrics, limits, and bounds of the
loss. Pure functions.
"""
