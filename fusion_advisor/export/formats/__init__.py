"""The formats that a run can be exported in: their names, and what writes each."""
