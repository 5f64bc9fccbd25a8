"""Every key of the configuration: those that were changed first, all of them searchable."""

from collections.abc import Mapping, Sequence
from typing import Any

from ping_llm.config.keys import KeyInfo
from ping_llm.config.sections import describe_keys
from ping_llm.report.markup import Content, Markup, details, element, table
from ping_llm.report.reading import Run
from ping_llm.report.sections import missing, section


def configuration(run: Run) -> Markup:
    if not run.settings:
        return section("configuration", "Configuration", missing("It cannot be read."))
    keys = {info.name: info for info in describe_keys()}
    changed = [name for name, value in run.settings.items() if name not in keys or keys[name].default != value]
    head = ["key", "value", "default", "meaning"]
    every = table(head, [_row(name, run.settings, keys) for name in run.settings], caption="All keys", class_="keys")
    return section(
        "configuration",
        "Configuration",
        element("h3", f"Changed: {len(changed)} of {len(run.settings)} keys"),
        table(head, [_row(name, run.settings, keys) for name in changed], caption="Changed keys", class_="keys")
        if changed
        else missing("All keys have their defaults."),
        details(
            f"All {len(run.settings)} keys",
            element(
                "label",
                "Search ",
                element("input", type="search", placeholder="key, value or meaning", data_filter=True),
                class_="search",
            ),
            every,
        ),
    )


def differences(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    """The keys in which runs differ."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    different = [
        key
        for key in keys
        if key not in ("run_name", "project", "base_output_directory")
        and len({repr(run.settings.get(key)) for run in runs}) > 1
    ]
    if not different:
        return section("configuration", "Configuration", missing("The runs have the same configuration."))
    rows = [[element("code", key), *(_value(run.settings.get(key)) for run in runs)] for key in different]
    caption = f"{len(different)} keys differ; {len(keys) - len(different)} are the same."
    return section(
        "configuration",
        "Where the configurations differ",
        table(["key", *names], rows, caption="Differing keys", class_="differing"),
        lead=caption,
    )


def _row(name: str, settings: Mapping[str, Any], keys: Mapping[str, KeyInfo]) -> list[Content]:
    info = keys.get(name)
    default = _value(info.default) if info else element("span", "unknown key", class_="faint")
    help_text = _help(info.help) if info else ""
    return [element("code", name), _value(settings[name]), element("td", default, class_="default"), help_text]


def _value(value: object) -> Markup:
    if value is None or value == "":
        return element("span", "–", class_="faint")
    return element("code", str(value).lower() if isinstance(value, bool) else str(value))


def _help(text: str) -> list[Content]:
    """What stands between backticks is code."""
    return [element("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))]
