"""Batches as a pure function of the step: `batch = f(sources, seed, step, batch size, length)` and nothing else.

    spec       what decides every batch, and the state from which a run resumes
    mixture    which source a sequence comes from
    source     any batch by its step
    documents  tokenised documents in files; `packing`: which of them share a sequence
    batch      segments laid out as the arrays that a model trains on
    loader     batches made ahead by worker processes
    report     where the time goes

Nothing here knows what the tokens mean, or imports JAX. Sequences come from a `SourceSpec`, of which there are three:
probe rows (`contexts`), text (`data/text.py`) and tokenised documents (`documents`).
"""
