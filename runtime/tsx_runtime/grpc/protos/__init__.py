"""The messages: each .proto file, the module that scripts/update_protos.py makes of it, and its
types.
"""
