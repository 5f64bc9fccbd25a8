"""Configuration: flat, typed keys from a YAML file and `key=value` overrides; `python -m ping_llm.config` lists all."""

from ping_llm.config.blends import Blend, parse_blend, parse_schedule, parse_steps
from ping_llm.config.keys import KEYS, Config
from ping_llm.config.loading import check_value, load_config

__all__ = ["KEYS", "Blend", "Config", "check_value", "load_config", "parse_blend", "parse_schedule", "parse_steps"]
