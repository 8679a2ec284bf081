"""Make text from unknown sources safe to print; say how to install what is missing."""


def spelled_out(text: str, plain: str = "\n") -> str:
    """Return `text` with unprintable characters, such as direction marks, escaped, except those in `plain`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in plain else c.encode("unicode_escape").decode() for c in text)


def pip_install(extra: str) -> str:
    """Return the command that installs what an extra needs, in a clone: Overspill is not on PyPI."""
    papers = " -e packages/overspill-papers" if extra in ("onnx", "papers", "tensorflow") else ""
    return f'pip install -c constraints.txt -e ".[{extra}]"{papers}'
