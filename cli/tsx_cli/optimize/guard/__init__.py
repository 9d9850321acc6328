"""The accuracy guard: metrics, limits, and confidence bounds of the loss.

Its pure functions decide whether a form's answers are as right as the reference's.
"""
