"""Rewrites: each is one record in one file, and ``registry`` names them all in their order.

In: a copied FX graph, or regions whose layouts change. Out: the number of sites changed.
"""
