"""Names as they may be shown: whoever made them could have put anything in."""


def spelled_out(text: str, plain: str = "\n") -> str:
    """`text` in which letters that have no look of their own, as marks of direction, stand as Python escapes them, but for `plain`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in plain else c.encode("unicode_escape").decode() for c in text)
