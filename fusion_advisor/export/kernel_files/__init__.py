"""Files of a package that holds kernels and no forward: ops, launchers, sources and references, shared by several formats."""
