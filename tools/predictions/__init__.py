"""How far predicted savings are from measured ones: ``python -m tools.predictions FOLDER … [--out FOLDER] [--calibrate]``."""
