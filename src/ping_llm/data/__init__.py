"""Where batches come from: for each `dataset_type` a module with the same two functions, found by `registry.py`."""
