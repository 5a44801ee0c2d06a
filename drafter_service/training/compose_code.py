"""Which requests for Python functions can be put together from parts?

A function's name, parameters and description come from lists; they are asked for as a signature with a docstring that
is to be completed, or in words. All written for this project; no function is taken from an evaluation set.
"""

from __future__ import annotations

import random

# Name, parameters (name: type, ...), result type, what it does, an example call's arguments and result.
FUNCTIONS = (
    ("count_words", "text: str", "int", "the number of words in the text", "'a quick test'", "3"),
    ("squared_total", "numbers: List[int]", "int", "the sum of the squares of the numbers", "[1, 2, 3]", "14"),
    ("second_largest", "numbers: List[int]", "int", "the second largest number in the list", "[4, 9, 7]", "7"),
    ("remove_vowel_words", "words: List[str]", "List[str]", "the words that do not begin with a vowel",
     "['apple', 'pear']", "['pear']"),
    ("celsius_to_fahrenheit", "celsius: float", "float", "the temperature in degrees Fahrenheit", "100.0", "212.0"),
    ("merge_sorted", "first: List[int], second: List[int]", "List[int]", "one sorted list with the items of two sorted "
     "lists", "[1, 4], [2, 3]", "[1, 2, 3, 4]"),
    ("chunk", "items: list, size: int", "list", "the items in consecutive lists of at most the given size",
     "[1, 2, 3], 2", "[[1, 2], [3]]"),
    ("most_common_letter", "text: str", "str", "the letter that occurs most often in the text", "'hello'", "'l'"),
    ("is_leap_year", "year: int", "bool", "whether the year is a leap year", "2024", "True"),
    ("flatten", "nested: list", "list", "a flat list of the items of a nested list", "[1, [2, [3]]]", "[1, 2, 3]"),
    ("running_total", "numbers: List[int]", "List[int]", "the list of sums of all numbers so far", "[1, 2, 3]",
     "[1, 3, 6]"),
    ("caesar", "text: str, shift: int", "str", "the text with every letter moved by shift places in the alphabet",
     "'abc', 1", "'bcd'"),
    ("find_index", "items: list, wanted", "int", "the first position of the wanted item, or -1 if it is not there",
     "[5, 6], 6", "1"),
    ("transpose", "matrix: List[List[int]]", "List[List[int]]", "the matrix with rows and columns exchanged",
     "[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]"),
    ("gcd_of_list", "numbers: List[int]", "int", "the greatest common divisor of all numbers", "[12, 18]", "6"),
    ("collatz_length", "n: int", "int", "the number of steps until the Collatz sequence of n reaches 1", "4", "2"),
    ("is_valid_ip", "address: str", "bool", "whether the address is a valid IPv4 address", "'10.0.0.1'", "True"),
    ("group_by_length", "words: List[str]", "dict", "a dictionary from length to the words of that length",
     "['a', 'to', 'b']", "{1: ['a', 'b'], 2: ['to']}"),
    ("median_of_three", "a: int, b: int, c: int", "int", "the middle one of three numbers", "3, 1, 2", "2"),
    ("digit_product", "n: int", "int", "the product of the digits of n", "234", "24"),
    ("rotate_left", "items: list, steps: int", "list", "the list rotated to the left by the given number of steps",
     "[1, 2, 3], 1", "[2, 3, 1]"),
    ("common_items", "first: list, second: list", "list", "the items that are in both lists, in order, without repeats",
     "[1, 2], [2, 3]", "[2]"),
    ("binary_search", "items: List[int], wanted: int", "int", "the position of wanted in a sorted list, or -1",
     "[1, 3, 5], 3", "1"),
    ("word_frequencies", "text: str", "dict", "how often each word occurs in the text", "'a b a'", "{'a': 2, 'b': 1}"),
    ("is_anagram", "first: str, second: str", "bool", "whether the two strings have the same letters",
     "'listen', 'silent'", "True"),
    ("nth_prime", "n: int", "int", "the n-th prime number", "3", "5"),
    ("triangle_area", "base: float, height: float", "float", "the area of a triangle", "4, 3", "6.0"),
    ("title_case", "text: str", "str", "the text with every word capitalized", "'a day'", "'A Day'"),
    ("count_capitals", "text: str", "int", "the number of upper-case letters in the text", "'aBC'", "2"),
    ("to_binary", "number: int", "str", "the binary digits of a number without a prefix", "5", "'101'"),
    ("from_roman", "numeral: str", "int", "the value of a Roman numeral", "'XIV'", "14"),
    ("longest_run", "items: list", "int", "the length of the longest run of equal items", "[1, 1, 2]", "2"),
    ("pair_sums", "numbers: List[int], total: int", "list", "all pairs of numbers whose sum is the total",
     "[1, 2, 3], 4", "[(1, 3)]"),
    ("mask_email", "address: str", "str", "the address with all but the first letter of the name replaced by stars",
     "'bob@x.org'", "'b**@x.org'"),
    ("moving_average", "numbers: List[float], window: int", "List[float]", "the averages of each window of numbers",
     "[1, 2, 3], 2", "[1.5, 2.5]"),
    ("depth", "brackets: str", "int", "how deep the brackets are nested", "'(())'", "2"),
    ("swap_case", "text: str", "str", "the text with upper and lower case exchanged", "'aB'", "'Ab'"),
    ("in_order", "items: list", "bool", "whether the items are in ascending order", "[1, 2, 2]", "True"),
    ("drop_every", "items: list, n: int", "list", "the items without every n-th one", "[1, 2, 3, 4], 2", "[1, 3]"),
    ("power_of_two", "n: int", "bool", "whether n is a power of two", "8", "True"),
    ("compress", "text: str", "str", "the text with runs of a letter written as the letter and its count", "'aab'",
     "'a2b1'"),
    ("hamming_distance", "first: str, second: str", "int", "the number of positions at which two strings differ",
     "'abc', 'abd'", "1"),
    ("unique_in_order", "items: list", "list", "the items without repeats, in order of appearance", "[3, 1, 3]",
     "[3, 1]"),
    ("replace_negative", "numbers: List[int]", "List[int]", "the numbers with negative ones replaced by zero",
     "[-1, 2]", "[0, 2]"),
    ("dot_product", "u: List[float], v: List[float]", "float", "the dot product of two vectors", "[1, 2], [3, 4]",
    "11"),
    ("parse_time", "text: str", "int", "the number of minutes after midnight of a time like '7:30'", "'7:30'", "450"),
    ("invert", "mapping: dict", "dict", "a dictionary with keys and values exchanged", "{'a': 1}", "{1: 'a'}"),
    ("count_pairs", "numbers: List[int]", "int", "how many pairs of equal numbers are in the list", "[1, 1, 2]", "1"),
    ("perfect_squares", "limit: int", "List[int]", "all perfect squares up to the limit", "10", "[1, 4, 9]"),
    ("strip_punctuation", "text: str", "str", "the text without punctuation", "'hi, you!'", "'hi you'"),
    ("interleave", "first: list, second: list", "list", "the items of two lists in turn", "[1, 3], [2, 4]",
     "[1, 2, 3, 4]"),
    ("max_difference", "numbers: List[int]", "int", "the largest difference between two numbers in the list",
     "[3, 9, 1]", "8"),
    ("factorial_digits", "n: int", "int", "the number of digits of n factorial", "5", "3"),
    ("shortest_word", "sentence: str", "str", "the shortest word of the sentence", "'we are here'", "'we'"),
)  # fmt: skip
VERBS = ("Return", "Returns", "Compute", "Calculate and return", "Find", "This function returns",
    "Given the arguments, "
         "return")  # fmt: skip
EXTRAS = (
    "", "", "", "If the input is empty, return None.", "Raise a ValueError for invalid input.",
    "The input may be empty.", "Do not change the arguments.", "Solve it without importing anything.",
    "The order of the result matters.", "It should run in linear time.",
)  # fmt: skip
FORMS = (
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Complete this function:\n\n```python\n{code}\n```", "Finish the implementation.\n\n```python\n{code}\n```",
    "{code}", "Implement the following function in Python:\n\n{code}",
)  # fmt: skip
ASKED = (
    "Write a Python function `{name}({names})` that returns {what}.",
    "Write a function called {name} that returns {what}.",
    "How do I write a Python function that returns {what}?",
    "Write a Python function to get {what}. Include an example.",
    "Implement {name} in Python: it returns {what}. Add type hints and a docstring.",
    "Write unit tests for a function `{name}({names})` that returns {what}.",
    "Write a JavaScript function that returns {what}.", "Explain how to compute {what} in Python, with code.",
)  # fmt: skip
FIRST_WORDS = (
    "Complete the following Python function.\n\n```python\ndef ",
    "Complete the following Python function.\n\n```python\nfrom typing import List\n\n\ndef ",
    "Complete the following Python function.\n\n```python\n\ndef ",
    "Complete the following Python function.\n\n```python\nimport math\n\n\ndef ",
)


def complete_form(code: str) -> str:
    """The request to complete `code`, a signature with a docstring."""
    return FORMS[0].format(code=code)


def code_prompt(rng: random.Random) -> str:
    """One request: three quarters as a signature to complete."""
    name, parameters, result, what, arguments, value = rng.choice(FUNCTIONS)
    names = ", ".join(part.split(":")[0].strip() for part in parameters.split(", "))
    if rng.random() < 0.25:
        return rng.choice(ASKED).format(name=name, names=names, what=what)
    typed = rng.random() < 0.65
    head = f"def {name}({parameters}) -> {result}:" if typed else f"def {name}({names}):"
    quotes = rng.choice(('"""', '"""', '"""', "'''"))
    lines = [f"{rng.choice(VERBS)} {what}."]
    if extra := rng.choice(EXTRAS):
        lines.append(extra)
    if rng.random() < 0.7:
        call = f"{name}({arguments})"
        lines += rng.choice(
            ([f">>> {call}", value], [f"{call} ==> {value}"], ["Example:", f"{call} should be {value}"])
        )
    begin = rng.choice(("", " ", "\n    "))
    code = f"{head}\n    {quotes}{begin}" + "\n    ".join(lines) + f"\n    {quotes}"
    if typed and "List[" in head:
        code = "from typing import List\n\n\n" + code
    return rng.choice(FORMS).format(code=code)
