"""What mkdocs does to a page of docs/ before it is shown: links into the source tree, which the site does not have, become plain text."""
import re

OUTWARD = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown, **_):
    return OUTWARD.sub(r"\1", markdown)
