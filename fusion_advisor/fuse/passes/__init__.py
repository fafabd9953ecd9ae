"""Graph rewrites, one file each; most need no kernel.

In: a copied FX graph. Out: the number of sites changed.
"""
