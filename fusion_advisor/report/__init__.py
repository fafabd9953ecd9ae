"""Views of a ``Report``: nothing is measured or decided here.

In: records. Out: rows, sentences and markdown that the HTML and terminal views share.
"""
