"""The parts of the page. Each takes one run or several, and gives HTML, or None where it has nothing to say."""

from ping_llm.report.markup import Content, Markup, element


def section(name: str, title: str, *content: Content, lead: Content = None) -> Markup:
    """`name` is what links go to."""
    return element(
        "section",
        element("h2", title, id=f"{name}-title"),
        element("p", lead, class_="lead") if lead else None,
        *content,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def missing(*text: Content) -> Markup:
    """Why there is nothing to see."""
    return element("p", *text, class_="missing")
