"""The ranking over a fleet of traces, as the terminal, markdown and HTML show it.

In: a :class:`fusion_advisor.records.fleet.FleetReport`. Out: text; every view prints the same sentences and rows.
"""
