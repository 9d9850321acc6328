"""The gRPC services of TorchServe and of the Open Inference Protocol (the extra `grpc`).

Their requests wait in the same queues of models as those of HTTP.
"""
