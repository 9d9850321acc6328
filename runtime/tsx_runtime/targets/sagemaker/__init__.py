"""SageMaker: real-time and multi-model endpoints, and batch transform jobs."""
