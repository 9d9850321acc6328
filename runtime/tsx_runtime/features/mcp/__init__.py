"""Models as tools for agents, by the Model Context Protocol (MCP) at `/mcp`.

The setting `mcp` offers all models that report a signature; `mcp: true` in model-config.yaml offers
one. The official SDK (the extra `mcp`) is imported by the first request.
"""
