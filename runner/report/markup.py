"""HTML and SVG, escaped by construction: what is not markup already becomes text."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "br", "line", "rect", "circle", "path", "polyline"})


class Markup(str):
    """Text that needs no escaping any more."""

    __slots__ = ()


def text(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. ``class_`` is class, ``stroke_width`` stroke-width; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{together(*children)}</{name}>")


def together(*children: object) -> Markup:
    return Markup("".join(text(child) for child in children))


def table(head: list[str], rows: list[list[object]], caption: str | None = None, numeric_from: int = 1) -> Markup:
    """Columns from ``numeric_from`` on are set flush right; the first of a row is its heading."""

    def side(column: int) -> str | None:
        return "number" if column >= numeric_from else None

    return tag(
        "div",
        tag(
            "table",
            *([tag("caption", caption)] if caption else []),
            tag("thead", tag("tr", *(tag("th", name, scope="col", class_=side(at)) for at, name in enumerate(head)))),
            tag(
                "tbody",
                *(
                    tag(
                        "tr",
                        *(
                            tag("th", cell, scope="row") if at == 0 else tag("td", cell, class_=side(at))
                            for at, cell in enumerate(row)
                        ),
                    )
                    for row in rows
                ),
            ),
        ),
        class_="scroll",
    )
