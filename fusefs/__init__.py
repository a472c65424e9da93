"""fusefs: the files of AI agents, kept in Postgres, as a real directory."""

__version__ = "0.1.0"
