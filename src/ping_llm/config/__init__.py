"""Configuration: flat, typed keys from a YAML file and `key=value` overrides; `python -m ping_llm.config` lists all."""

from ping_llm.config.keys import KEYS, Config, check_value, find_key
from ping_llm.config.loading import load_config
from ping_llm.config.rules import Blend, parse_blend

__all__ = ["KEYS", "Blend", "Config", "check_value", "find_key", "load_config", "parse_blend"]
