"""Every key of the configuration: those that were changed first, all of them searchable."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from ping_llm.config import KEYS
from ping_llm.report.figures import Figures, kind_of, token_word
from ping_llm.report.markup import Content, Markup, definitions, details, element, table
from ping_llm.report.run import Run, Session
from ping_llm.report.scales import SI, short
from ping_llm.report.sections import missing, section
from ping_llm.report.sections.overview import hardware, lasting


def configuration(run: Run) -> Markup:
    if not run.settings:
        return section("configuration", "Configuration", missing("It cannot be read."))
    changed = [name for name, value in run.settings.items() if name not in KEYS or KEYS[name].default != value]
    head = ["key", "value", "default", "meaning"]
    every = table(head, [_row(name, run.settings) for name in run.settings], caption="All keys", class_="keys")
    return section(
        "configuration",
        "Configuration",
        element("h3", f"Changed: {len(changed)} of {len(run.settings)} keys"),
        table(head, [_row(name, run.settings) for name in changed], caption="Changed keys", class_="keys")
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


def _row(name: str, settings: Mapping[str, Any]) -> list[Content]:
    info = KEYS.get(name)
    default = _value(info.default) if info else element("span", "unknown key", class_="faint")
    help_text = _help(info.description or "") if info else ""
    return [element("code", name), _value(settings[name]), element("td", default, class_="default"), help_text]


def _value(value: object) -> Markup:
    if value is None or value == "":
        return element("span", "–", class_="faint")
    return element("code", str(value).lower() if isinstance(value, bool) else str(value))


def _help(text: str) -> list[Content]:
    """What stands between backticks is code."""
    return [element("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))]


# What a run can be made again from: model, machine, data and its fingerprint, and its sessions.


def model_and_data(run: Run, found: Figures) -> Markup:
    s = run.settings
    machine = run.sessions[-1].machine if run.sessions else {}
    peak = machine.get("peak_flops")
    model = [
        ("model", kind_of(run)),
        ("parameters", f"{found.parameters:,}" if found.parameters else None),
        ("layers × width", _product(s.get("base_num_decoder_layers"), s.get("base_emb_dim"))),
        ("heads × size", _product(s.get("base_num_query_heads"), s.get("head_dim"))),
        ("MLP width", s.get("base_mlp_dim")),
        (f"FLOP a {token_word(run)}", short(found.flops_per_token, SI) if found.flops_per_token else None),
        ("FLOP in all", short(found.flops, SI) if found.flops else None),
        ("optimizer", _joined(s.get("opt_type"), s.get("learning_rate_schedule"), s.get("learning_rate"))),
    ]
    machines = [
        ("devices", hardware(run) or None),
        ("processes", machine.get("processes")),
        ("peak of a device", f"{short(peak, SI, chr(32))}FLOP/s" if isinstance(peak, int | float) else "unknown"),
        ("arithmetic", machine.get("arithmetic") or _joined(s.get("dtype"), "on", s.get("weight_dtype"), "weights")),
        ("ping-llm", machine.get("ping_llm")),
        ("JAX", machine.get("jax")),
        ("Python", machine.get("python")),
    ]
    return section(
        "origin",
        "Model, machine, data",
        element(
            "div",
            element("div", element("h3", "Model"), definitions(model)),
            element("div", element("h3", "Machine"), definitions(machines) if machine else missing("Not recorded.")),
            element("div", element("h3", "Data and fingerprint"), definitions(_data(run))),
            class_="columns",
        ),
    )


def fingerprint(run: Run) -> str:
    """Of the configuration, without what the run is called and where it lies."""
    told = {k: v for k, v in run.settings.items() if k not in ("run_name", "project", "base_output_directory")}
    return hashlib.sha256(yaml.safe_dump(told, sort_keys=True).encode()).hexdigest()


def _data(run: Run) -> Iterator[tuple[str, Content]]:
    yield "dataset_type", run.dataset_type
    for key in ("network_train_files", "grain_train_files", "hf_train_files", "dataset_path"):
        if run.settings.get(key):
            yield key, element("code", str(run.settings[key]))
    yield "configuration", _hash(fingerprint(run))
    for key, value in (run.data.identity if run.data else {}).items():
        if key == "positions":
            continue
        if key == "rows" and isinstance(value, list):
            yield "rows", [_hash(str(rows)) for rows in value]
        elif key != "dataset_type":
            yield key.removeprefix("contexts.").replace("_", " "), _hash(value) if _is_hash(value) else str(value)
    if not run.data:
        yield "fingerprint", "not stored yet: it comes with the first checkpoint"


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) >= 32


def _hash(value: object) -> Markup:
    return element("code", str(value)[:16], title=str(value))


def _product(*values: object) -> str | None:
    return " × ".join(map(str, values)) if None not in values else None


def _joined(*values: object) -> str | None:
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values) if None not in values else None


def history(run: Run) -> Markup:
    if not run.sessions:
        return section("history", "History", missing("When it began, stopped and went on was not recorded."))
    rows = [[f"{number}", *_session(run, number - 1)] for number in range(1, len(run.sessions) + 1)]
    head = ["session", "began, UTC", "at step", "lasted", "on", "ended"]
    return section("history", "History", table(head, rows, caption="Sessions of the run", class_="sessions"))


def _session(run: Run, index: int) -> list[Content]:
    session = run.sessions[index]
    machine = session.machine
    on = f"{machine.get('devices', '?')} × {machine.get('device', '?')}"
    lasted = lasting(session.ended - session.begun) if session.begun and session.ended else "–"
    began = f"{session.begun:%Y-%m-%d %H:%M:%S}" if session.begun else "–"
    last = index == len(run.sessions) - 1
    return [began, f"{session.first_step:,}", lasted, on, element("td", _end(session, last=last), class_="text")]


def _end(session: Session, *, last: bool) -> Content:
    if session.error:
        return element("span", session.error, class_="bad")
    if session.ended:
        return "as asked"
    return "not yet, or without a word" if last else "without a word: killed, or its machine was gone"
