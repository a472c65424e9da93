"""The command line (layer 7): one module per command group; it translates and decides nothing about files."""
