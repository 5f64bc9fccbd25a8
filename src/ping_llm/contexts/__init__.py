"""From probe rows to sequences: contexts are drawn from histories and share sequences of tokens.

    spec      which rows, and how they become contexts
    plan      which samples of rows share a sequence, from the row index alone
    segments  the measurements of each sample, drawn, cut to fit and written as tokens
    source    both together: any sequence by its number, and where its tokens come from

`plan` and `segments` hold compiled loops. `tests/reference_*.py` are plain versions of them, which are the
specification: both agree to the last bit.
"""
