"""Reads a page as a browser would: elements with their attributes and text, and whether what opens is closed."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "hr", "img", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    inside: tuple[str, ...]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def within(self, tag: str) -> list["Element"]:
        """Return all elements of a tag below this one."""
        return [e for child in self.children for e in ([child] if child.tag == tag else []) + child.within(tag)]


class Page(HTMLParser):
    """A page's elements in document order; an element's text is all that lies in it. What is not closed raises."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.stack: list[Element] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.stack, f"never closed: {[element.tag for element in self.stack]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), tuple(outer.tag for outer in self.stack))
        assert len(element.attributes) == len(attrs), f"an attribute of {tag} is there twice"
        if self.stack:
            self.stack[-1].children.append(element)
        self.elements.append(element)
        if tag not in VOID:
            self.stack.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack[-1].tag == tag, f"</{tag}> closes <{self.stack[-1].tag}>"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        for element in self.stack:
            element.text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Return the elements of a tag with all of the given attributes; `class_` is one of its classes."""
        wanted = attributes.pop("class_", None)
        return [
            e
            for e in self.elements
            if e.tag == tag
            and all(e.attributes.get(name) == value for name, value in attributes.items())
            and (wanted is None or wanted in (e.attributes.get("class") or "").split())
        ]

    def one(self, tag: str, **attributes: str) -> Element:
        (element,) = self.all(tag, **attributes)
        return element
