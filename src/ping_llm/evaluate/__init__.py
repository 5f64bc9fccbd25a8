"""Evaluation: models beside the classical predictors, on measurements that none of them has seen.

split      which measurements are learned from, known, or asked about; as arrays and as files
protocols  who is asked what; the truth about simulated measurements
scores     how good the answers are: names, tables, JSON
plots      pictures
"""
