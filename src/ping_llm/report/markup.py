"""HTML that cannot be injected into: elements are built from Python values, and every text among them is escaped.

>>> element("p", "1 < 2", class_="note")
'<p class="note">1 &lt; 2</p>'
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_VOID: Final = frozenset(("br", "hr", "input", "meta", "link", "path", "rect", "line", "circle"))


class Markup(str):
    """Text that is HTML already. Only this module makes it from pieces, and page.py from files of this package."""

    __slots__ = ()


Content = str | int | float | None | Iterable["Content"]
Attribute = str | int | float | bool | None


def element(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """An element. `class_` is `class`, `data_step` is `data-step`; None and False leave an attribute out."""
    written = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID and not content:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")


def join(content: Content, between: str = "") -> Markup:
    """Pieces one after the other; what is not `Markup` is escaped."""
    if content is None:
        return Markup("")
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int | float):
        return Markup(escape(str(content)))
    return Markup(escape(between).join(join(piece) for piece in content))


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def details(summary: Content, *content: Content, open_: bool = False, **attributes: Attribute) -> Markup:
    """What is shown when asked for."""
    return element("details", element("summary", summary), *content, open=open_, **attributes)


def table(head: Iterable[Content], rows: Iterable[Iterable[Content]], *, caption: str = "", class_: str = "") -> Markup:
    """The first column names the rows. It scrolls by itself where the page is narrow."""
    lines = [
        element(
            "tr", element("th", first, scope="row"), [cell if _is_cell(cell) else element("td", cell) for cell in rest]
        )
        for first, *rest in rows
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", caption, class_="hidden") if caption else None,
            element("thead", element("tr", [element("th", cell, scope="col") for cell in head])),
            element("tbody", lines),
            class_=class_ or None,
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption or "table",
    )


def _is_cell(content: Content) -> bool:
    return isinstance(content, Markup) and content.startswith("<td")


def definitions(pairs: Iterable[tuple[Content, Content]]) -> Markup:
    """Names with their values; those without a value are left out."""
    shown = [(name, value) for name, value in pairs if value not in (None, "")]
    return element(
        "dl", [element("div", element("dt", name), element("dd", value)) for name, value in shown], class_="facts"
    )


def tabbed(label: str, panels: Sequence[tuple[str, Markup]]) -> Markup:
    """All panels are in the page, one after the other; the script makes tabs of them."""
    shown_panels = [
        element("div", element("h3", title, class_="tab-title"), panel, class_="panel", data_title=title)
        for title, panel in panels
    ]
    return element("div", shown_panels, class_="tabs", data_label=label)
