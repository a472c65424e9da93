"""An agent's files in the forms that other libraries ask for (layer 6): deepagents, Anthropic's memory tool, fsspec."""
