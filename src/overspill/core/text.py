"""Make text from unknown sources safe to print."""


def spelled_out(text: str, plain: str = "\n") -> str:
    """Return `text` with unprintable characters, such as direction marks, escaped, except those in `plain`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in plain else c.encode("unicode_escape").decode() for c in text)
