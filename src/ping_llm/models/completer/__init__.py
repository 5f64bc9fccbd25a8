"""The completer: completes latencies from context, without having seen the addresses before.

settings        sizes and shares
draws           random numbers of one world
internet        the prior: where nodes are, and how far apart
disturbances    the prior: load, changes of route, jitter, loss, resolution
kinship         who shares prefixes of addresses with whom
selection       which measurements a context holds: the rule
worlds          batches of simulated worlds, a pure function of the step
features        numbers on their way into the model
bins, answers   distributions on their way out
attention       attention to the context
model           the set transformer
loss            what training minimises
context         contexts of real questions: the rule again, over all known measurements
complete        answers
distribution    the distribution of an answer
statistics      what kind of Internet a set of RTTs is: prior against reality
evaluate_real   zero-shot figures on real data
"""

from ping_llm.models.completer.answers import BinDistribution, loss_sums
from ping_llm.models.completer.complete import Completer, PredictionSettings
from ping_llm.models.completer.model import CompleterSettings, SetTransformer
from ping_llm.prior.settings import WorldSettings
from ping_llm.prior.worlds import world_batch, worlds_of

__all__ = [
    "BinDistribution",
    "Completer",
    "CompleterSettings",
    "PredictionSettings",
    "SetTransformer",
    "WorldSettings",
    "loss_sums",
    "world_batch",
    "worlds_of",
]
