"""Stock MaxText on our input pipeline: `python -m ping_llm.integrations.maxtext CONFIG key=value…`.

No file of MaxText is changed. `seams` names the places where the engine takes hold and checks them at start, `config`
adds our keys to MaxText's own configuration, `iterators` gives MaxText its batches, `launch` puts it together.
`architecture`, `weights` and `checkpoints` carry trained models over, in both directions, and need no MaxText.
"""
