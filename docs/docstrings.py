"""Docstrings as Hugging Face writes them, as Markdown for mkdocstrings."""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(Args|Parameters|Attributes|Returns|Raises|Example):\n((?:(?:    .*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+(?: \(.*?\))?(?:, \w+ \(.*?\))*|`[^`]+`(?: or `[^`]+`)*):\s+")


class HuggingFace(griffe.Extension):
    """Turns sections of docstrings into lists, and references in brackets into code."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text):
    text = re.sub(r"\[`~?([^`\]]+)`\]", r"`\1`", text)
    text = text.replace("\n> [!NOTE]\n", "\n")
    return SECTION.sub(lambda section: f"**{section[1]}**\n\n{entries(section[2])}\n", f"{text}\n")


def entries(block):
    """An indented block, with each of its entries as an item of a list."""
    lines = []
    for line in textwrap.dedent(block).splitlines():
        if (entry := ENTRY.match(line)) or ENTRY.match(f"{line} "):
            name = entry[1] if entry else line.rstrip(":")
            name = re.sub(r"^(\w+)|(?<=, )(\w+)(?= \()", lambda m: f"`{m[0]}`", name)
            lines += ["", f"- {name}: {line[entry.end() :] if entry else ''}"]
        elif line.startswith("> "):
            lines += ["", f"*{line[2:]}*"]
        else:
            lines.append(line)
    return "\n".join(lines)
