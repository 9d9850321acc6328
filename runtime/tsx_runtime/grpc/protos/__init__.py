"""The messages: the .proto files, the modules that scripts/update_protos.py makes, and types."""
