"""A synthetic Internet with structure that a model can discover and an exact answer to compare with.

settings -> world (geography -> hosts -> streams) -> measurements
              └-> delays: the true distribution for any source, destination and time
"""

from ping_llm.sources.simulator.delays import DelayDistribution
from ping_llm.sources.simulator.geography import SimulatorSettings
from ping_llm.sources.simulator.world import World, generate, generate_slice, simulate

__all__ = ["DelayDistribution", "SimulatorSettings", "World", "generate", "generate_slice", "simulate"]
