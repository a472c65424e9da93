"""The rules (layer 0): names, limits, policy and errors. No I/O, standard library only."""
