"""The sentences and rows of a fleet's ranking, as the terminal, markdown and HTML print them.

In: a :class:`fusion_advisor.records.trace.FleetReport`. Out: text and tables.
"""
