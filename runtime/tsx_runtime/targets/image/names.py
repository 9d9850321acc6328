"""Variables by which an image is told where it runs."""

TARGET = "TSX_TARGET"  # which the image sets and its entry reads: no setting of a server
RUNTIME_API = "AWS_LAMBDA_RUNTIME_API"  # Lambda's, host and port: who has it is on Lambda
