"""The door to the kernel (layer 6): the only user of pyfuse3. It translates and decides nothing."""
