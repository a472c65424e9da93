"""The core (layer 4): what a mounted tree looks like, and only here. No FUSE, no SQL."""
