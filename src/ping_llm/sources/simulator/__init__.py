"""A synthetic Internet with structure that a model can discover and an exact answer to compare with.

settings -> world (geography -> endpoints -> streams) -> measurements
              └-> delay model -> distribution: the truth about any source, destination and time
"""

from ping_llm.sources.simulator.distribution import Distribution
from ping_llm.sources.simulator.settings import SimulatorSettings
from ping_llm.sources.simulator.world import SimulationSummary, World, generate, generate_slice, simulate, slice_bounds

__all__ = [
    "Distribution",
    "SimulationSummary",
    "SimulatorSettings",
    "World",
    "generate",
    "generate_slice",
    "simulate",
    "slice_bounds",
]
