"""Configuration: flat, typed keys from a YAML file and `key=value` overrides; `python -m ping_llm.config` lists all."""

from ping_llm.config.blend import parse_blend
from ping_llm.config.keys import KeyInfo
from ping_llm.config.load import key_tables, load_config
from ping_llm.config.sections import Config, describe_keys

__all__ = ["Config", "KeyInfo", "describe_keys", "key_tables", "load_config", "parse_blend"]
