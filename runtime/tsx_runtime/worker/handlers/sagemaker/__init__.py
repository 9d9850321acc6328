"""Handlers written for the SageMaker inference toolkit."""
