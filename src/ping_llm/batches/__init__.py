"""From probe rows to batches: `batch = f(rows, seed, step, batch size, length)` and nothing else.

    spec      what decides every batch: rows, weights, seed, shape; and the state from which a run resumes
    mixture   which row set a sequence comes from
    plan      which samples of rows share a sequence, from the row index alone
    segments  the measurements of each sample, drawn, cut to fit and written as tokens
    batch     segments laid out as the arrays that a model trains on
    source    any batch by its step
    loader    batches made ahead by worker processes; `device` puts them on the accelerator
    report    where the time goes; `explain`: where any token comes from

`plan`, `segments` and `batch` hold compiled loops. `tests/reference_*.py` are plain versions of them, which are the
specification: both agree to the last bit.
"""
