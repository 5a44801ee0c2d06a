"""Prompts for training: what is put together from parts, and what is found in documented code."""

from __future__ import annotations

import ast
import random
import zipfile
from pathlib import Path

from drafter_service.training.compose_chat import FOLLOW_UPS, TEMPLATES, chat_prompt, follow_up
from drafter_service.training.compose_code import code_prompt, complete_form
from drafter_service.training.compose_math import math_prompt
from drafter_service.training.documented import documented_functions, signatures


def test_composed_prompts_are_whole_varied_and_reproducible() -> None:
    for compose in (chat_prompt, code_prompt, math_prompt, follow_up):
        prompts = [compose(random.Random(seed)) for seed in range(400)]
        assert prompts == [compose(random.Random(seed)) for seed in range(400)]
        assert all(prompt.strip() and "{topic" not in prompt and "{a}" not in prompt for prompt in prompts)
        distinct = len(set(prompts))
        assert distinct > (30 if compose is follow_up else 300), (compose, distinct)
    assert len(set(TEMPLATES)) == len(TEMPLATES)
    assert len(set(FOLLOW_UPS)) == len(FOLLOW_UPS)


def test_functions_to_complete_are_python() -> None:
    found = 0
    for seed in range(300):
        prompt = code_prompt(random.Random(seed))
        if "```python\n" in prompt:
            code = prompt.split("```python\n")[1].removesuffix("\n```")
            function = ast.parse(code).body[-1]
            assert isinstance(function, ast.FunctionDef)
            assert ast.get_docstring(function)
            found += 1
    assert found > 100


SOURCE = '''
import math

def area(radius: float) -> float:
    """The area of a circle with the given radius, in the square of its unit."""
    return math.pi * radius**2

def _hidden(x):
    """Not public, so nobody is asked to complete it, whatever is said here."""
    return x

def only_said():
    """A docstring and nothing else: there would be nothing to complete in this one."""

class Box:
    def method(self):
        """A method; what it means depends on its class, so it is left out too."""
        return 1
'''


def test_only_documented_public_functions_with_a_body_are_taken(tmp_path: Path) -> None:
    (head,) = signatures(SOURCE)
    assert head.startswith('def area(radius: float) -> float:\n    """The area')
    assert "math.pi" not in head
    assert list(signatures("def broken(")) == []
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/code.py", SOURCE)
        archive.writestr("some/test_code.py", SOURCE.replace("area", "tested_area"))
    found = documented_functions([wheel])
    assert head in found
    assert not any("tested_area" in code for code in found)
    assert len(found) > 100  # Python's own library
    assert complete_form(head).startswith("Complete the following Python function.\n\n```python\ndef area")
