"""The points of ranges: in what order they are decided, which take over what was decided at another, and in how much time.

In: a call's pieces as they are captured. Out: what runs near each point, and the rows of the report.
"""
