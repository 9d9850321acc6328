"""As many workers as the load needs: within `minWorkers` and `maxWorkers`, down to none, and within
a budget of memory.
"""
