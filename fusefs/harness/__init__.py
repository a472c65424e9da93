"""The agent's side of a model's API (layer 6): middleware around tools, and the loop between model and tools."""
