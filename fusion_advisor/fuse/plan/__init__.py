"""Which chains get which kernel, before anything is built.

In: a ``Capture``, the library's patterns and options. Out: ``Plan`` with every fusion and every reason against one.
"""
