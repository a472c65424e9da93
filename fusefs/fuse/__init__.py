"""The door to the kernel (layer 6). It translates and decides nothing."""
