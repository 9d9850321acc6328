"""gRPC: the services of TorchServe and of the Open Inference Protocol (the extra `grpc`).

Their requests wait in the same queues of models as those of HTTP. `enable_grpc` turns it off, and
`grpc_*` set addresses and limits (docs/guides/grpc.md).
"""
