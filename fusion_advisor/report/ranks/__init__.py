"""The rows and sentences about a run on several ranks, as the terminal, markdown and HTML print them.

In: a :class:`fusion_advisor.records.Report`. Out: text and rows. It imports nothing else of the report.
"""
