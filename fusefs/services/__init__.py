"""What agents do with files, as services over the store: used by tools, harness and command line."""
