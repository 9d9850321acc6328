"""tsx beside TorchServe, Mosec and LitServe: the same models, one at a time, in turns, and one
table.
"""
