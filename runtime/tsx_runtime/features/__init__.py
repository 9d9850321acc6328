"""The optional parts of the server, one folder each; a folder can be removed.

`tsx_runtime.feature` describes what a folder has.
"""

# The features through which a request passes, the first one first. All others follow by name.
ORDER = ("cache", "recording", "shadows")
