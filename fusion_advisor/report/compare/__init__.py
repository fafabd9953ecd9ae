"""Two runs against each other, and gates on their ratios.

In: two reports. Out: ``Comparison`` and its tables.
"""
