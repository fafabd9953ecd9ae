"""The rows and sentences about ranges of sizes (``--shapes``), as the terminal, markdown, HTML and CSV print them.

In: :class:`fusion_advisor.records.ShapeRanges`. Out: text, and figures for a chart. It imports nothing else of the report.
"""
