"""The report of a run: one self-contained HTML file with curves, pipeline, evaluation, sequences and settings.

run        what the run's folder holds
figures    its key figures, how it stands, warnings
charts     a chart: lines thinned to few points, the table behind it, and its JSON; those of training and evaluation
sections   what the other sections say
page       all of it in templates/, with the styles and scripts of static/

static/ has uPlot (MIT licence) and our wrapper of it, chart.js, which the web page of `ping-llm serve` uses as well.
"""
