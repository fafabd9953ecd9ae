"""How kernels are launched: what a package must know, computed where it is exported."""
