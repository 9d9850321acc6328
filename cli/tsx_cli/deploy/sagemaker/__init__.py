"""SageMaker endpoints."""
