"""The sentences and rows of a fleet's ranking, which the terminal, markdown and HTML print alike.

In: a :class:`fusion_advisor.records.trace.FleetReport`. Out: text and tables.
"""
