"""The rows and sentences about a training step (``--phase train``), as the terminal, markdown, HTML and CSV print them.

In: a :class:`fusion_advisor.records.Report` of that phase. Out: text and rows. It imports nothing else of the report.
"""
