"""The gRPC messages: .proto files, and what scripts/update_protos.py generates from them."""
