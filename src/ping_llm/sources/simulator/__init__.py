"""A synthetic Internet with structure that a model can discover and an exact answer to compare with.

settings -> world (geography -> endpoints -> streams) -> measurements
              └-> delay model -> distribution: the truth about any source, destination and time
"""

from ping_llm.sources.simulator.distribution import Distribution
from ping_llm.sources.simulator.generate import generate, generate_slice, slice_bounds
from ping_llm.sources.simulator.settings import SimulatorSettings
from ping_llm.sources.simulator.world import World
from ping_llm.sources.simulator.write import SimulationSummary, simulate

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
