"""What a run can be made again from: model, machine, data and its fingerprint, and its sessions."""

import hashlib
from collections.abc import Iterator

import yaml

from ping_llm.report.figures import Figures, kind_of, token_word
from ping_llm.report.markup import Content, Markup, definitions, element, table
from ping_llm.report.reading import Run
from ping_llm.report.scales import SI, short
from ping_llm.report.sections import missing, section
from ping_llm.report.sections.overview import hardware, lasting
from ping_llm.report.sessions import Session


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
