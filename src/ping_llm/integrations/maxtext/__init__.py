"""Stock MaxText on our input pipeline: `python -m ping_llm.integrations.maxtext CONFIG key=value…`.

No file of MaxText is changed. `launch` checks and replaces the few names in it where we take hold, and starts its
trainer; `iterators` gives it checked batches. `convert` carries trained models over, in both directions, and needs no
MaxText.
"""
