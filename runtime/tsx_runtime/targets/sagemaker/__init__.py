"""SageMaker endpoints: real-time, batch transform, several models."""
