"""The prior of the completer, a prior-fitted network (PFN): simulated Internets, and the tasks drawn from them.

A PFN is trained on data sets drawn from a prior, each with a context and questions, until it answers for any data set
of that kind by in-context learning, without a gradient step. Here a data set is a partly measured latency matrix.

prng          random numbers of one world
internet      where nodes are, how far apart, and what time does to their RTTs
selection     which measurements make the context of a question: the rule, also of prediction
worlds        batches of simulated worlds, a pure function of (settings, seed, step), with the same rule compiled
fine_tuning   the same batches from real measurements
"""
