"""The command `tsx batch`: a model over many inputs, without a server."""

POSITION = 50
SUMMARY = "Run a model over files, JSON lines, CSV, Parquet or S3 objects, without a server."
