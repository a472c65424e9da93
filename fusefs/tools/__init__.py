"""The doors for agent harnesses (layer 6): MCP, the proxy in front of MCP servers, hooks, adapters."""
