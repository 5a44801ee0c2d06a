"""What can be wrong with a model's text side: its tokenizer files, its chat template, or what it is asked to render?"""

from __future__ import annotations


class TextError(Exception):
    """A model directory whose tokenizer or chat template cannot be read. The message names the file."""


class TemplateRefusal(Exception):
    """The chat template does not take these messages (roles out of order, a kind of content it does not know)."""
