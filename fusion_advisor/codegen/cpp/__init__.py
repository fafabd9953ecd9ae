"""Prints programs as C++ with OpenMP and compiles them with the system's compiler."""
