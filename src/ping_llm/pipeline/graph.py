"""The pipeline as a picture: a box for each stage, darker where more of the time goes, the bottleneck outlined."""

from typing import Any
from xml.sax.saxutils import escape

_PITCH, _WIDTH = 150, 120
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 140" font-family="sans-serif" font-size="13">'
    '<defs><marker id="a" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
    '<path d="M0 0L6 3L0 6z" fill="#335"/></marker></defs>'
)


def draw(report: dict[str, Any]) -> str:
    """SVG of a pipeline report (`PipelineReport.to_json`)."""
    names = ["rows", *report["stages"], "training"]
    notes = {name: f"{s['ms_per_batch']:.2f} ms, {s['share']:.0%}" for name, s in report["stages"].items()}
    notes["training"] = f"waits {report['wait_share']:.1%}"
    where = f"{report['workers']} worker process(es)" if report["workers"] else "in the training process"
    speed = f"{report['real_tokens_per_s']:,} tokens/s, {where}, padding {report['padding_fraction']:.2%}"
    parts = [_HEAD.format(width=20 + len(names) * _PITCH), _text(20, 24, speed)]
    for i, name in enumerate(names):
        share = report["stages"].get(name, {}).get("share", 0.0)
        parts.append(_box(20 + i * _PITCH, name, notes.get(name, ""), share, outlined=name == report["bottleneck"]))
        if i:
            parts.append(f'<path d="M{20 + i * _PITCH - 30} 68 h26" stroke="#335" marker-end="url(#a)"/>')
    parts.append(_text(20, 124, f"bottleneck: {report['bottleneck']}; {report['advice']}"))
    return "".join(parts) + "</svg>\n"


def _box(x: int, name: str, note: str, share: float, *, outlined: bool) -> str:
    shade = int(245 - 130 * share)
    look = f'fill="rgb({shade},{shade},250)" stroke="#335" stroke-width="{3 if outlined else 1}"'
    rectangle = f'<rect x="{x}" y="40" width="{_WIDTH}" height="56" rx="8" {look}/>'
    middle = x + _WIDTH // 2
    return rectangle + _text(middle, 64, name, "middle") + _text(middle, 84, note, "middle")


def _text(x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
