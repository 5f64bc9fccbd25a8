"""The report of a run: one self-contained HTML file with curves, pipeline, evaluation, sequences and settings."""
