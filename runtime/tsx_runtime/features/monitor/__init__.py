"""The monitoring of models: drift of inputs and answers, quality by version, and groups.

`PUT /models/NAME/monitor`, `tsx models monitor` or `monitor` in model-config.yaml turns it on. A
share of the requests goes to a process of its own, which computes all statistics. `POST
/feedback/NAME` joins the truth with the answers (docs/guides/monitoring.md).
"""
