"""Workflows: graphs of models and functions that answer a request together.

`load_workflows`, `tsx serve FLOW.war` or `POST /workflows` registers one. `/wfpredict/NAME` runs it
(docs/guides/workflows.md).
"""
