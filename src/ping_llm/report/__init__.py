"""A run to look at: one HTML file without any other file, with curves, pipeline, evaluation, sequences and settings.

`reading.py` finds what a run's folder holds, `chart.py`, `plot.py` and `draw.py` make charts of its curves, `sections/`
say what it means, `page.py` puts the page together. Text reaches the page through `markup.py` alone, which escapes it.
"""
