"""How each kind of rewrite that is judged on top of the fusions is tried, put in again, and carried to another shape.

In: what was kept so far, and a record of ``passes``. Out: what is kept now.
"""
