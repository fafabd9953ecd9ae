"""Lowers a chain of ATen ops to an IR program.

In: op records and the members of a chain. Out: ``Lowered`` (program, inputs, outputs), or ``CannotLower`` with the reason.
"""
