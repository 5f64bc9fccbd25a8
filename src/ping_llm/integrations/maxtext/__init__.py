"""Stock MaxText on our input pipeline: `python -m ping_llm.integrations.maxtext CONFIG key=value…`.

No file of MaxText is changed. `launch` replaces four of its functions, after checking that they are as expected, and
starts its trainer; `iterators` gives it checked batches. `convert` converts trained models in both directions, and
needs no MaxText.
"""
