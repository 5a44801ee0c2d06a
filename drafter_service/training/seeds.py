"""Which beginnings does the target get when it writes its own user turns?

An empty user turn gives what the model was tuned on most. A few first words steer it: the rest of the question is still
the model's. Nothing here comes from an evaluation set.
"""

from __future__ import annotations

from collections.abc import Mapping

from drafter_service.training.compose_code import FIRST_WORDS

CHAT = (
    "What is", "What are the", "How do I", "How can I", "How does", "Why do", "Why is", "Can you explain", "Explain",
    "Describe", "Write a short story about", "Write an essay about", "Write a letter to", "Write a poem about",
    "Write a blog post about", "Write a dialogue between", "Compose an email", "Summarize the following text:",
    "Rewrite the following sentence", "Translate", "Give me some tips", "Give me a list of", "List", "Suggest",
    "Compare", "What would happen if", "Imagine you are", "Pretend that you are", "Act as", "Create a", "Design a",
    "Provide a", "Discuss the", "Analyze", "Help me", "I need help with", "I want to", "I am planning",
    "I'm looking for",
    "Who was", "Who is", "When did", "Where is", "Which", "Tell me about", "Is it true that", "Should I", "Could you",
    "Outline", "Draft a", "Edit the following paragraph", "Identify the", "Classify", "Extract", "In one sentence,",
    "Given the following", "Read the passage below", "Based on the text", "Make this more concise:",
    "What's the difference",
    "Write a product description for", "Write a review of", "Propose", "Plan a", "Name", "Recommend", "Evaluate the",
    "What are some common", "Write a persuasive", "Develop a", "Hi", "Hello", "Hey,", "My", "The",
)  # fmt: skip

CODE = (
    "Write a Python function", "Write a Python function that takes", "Write a Python program", "Write a Python script",
    "Write a function", "Write a function in Python that", "Implement a function", "Implement the", "Implement a class",
    "Create a Python class", "Create a function called", "Complete the following Python function:\n\n```python\ndef ",
    "Complete the following code:\n\ndef ", "Complete the function below.\n\ndef ",
    "Complete this function:\n\n```python\n",
    "Here is a Python function:\n\ndef ", "def ", "from typing import List\n\n\ndef ", "import ", "class ",
    "Fix the bug in this code", "Explain what this code does:\n\n", "What does the following Python code", "Debug the",
    "How do I write a function", "How do I sort a list", "How can I read a file in Python",
    "Write a JavaScript function",
    "Write a SQL query", "Write a C++ program", "Write a Java method", "Write unit tests for",
    "Refactor the following code",
    "Given a list of integers, write a function", "Given a string, write a Python function", "Given two",
    "Write code to", "Write a recursive function", "Write a class", "Using Python, write", "Develop a Python function",
    "Write a Python function to find", "Write a Python function to check", "Write a Python function to calculate",
    "Write a Python function that returns", "Write a regular expression", "Write a bash script", "Write an algorithm",
    "Create a Python function to count", "Create a Python function that converts", "Write an HTML page",
    "You are given an array", "Optimize the following", "Convert the following",
)  # fmt: skip

NAMES = (
    "Sarah", "Tom", "Maria", "Jack", "Emily", "David", "Anna", "Lucas", "Sofia", "Ben", "Mia", "Omar", "Grace", "Leo",
    "Nina", "Paul", "Rosa", "Sam", "Tara", "Victor", "Wendy", "Yusuf", "Zoe", "Ivan", "Chloe", "Hugo", "Ravi", "Mei",
)  # fmt: skip

MATH = (
    "Solve", "Solve for x:", "Solve the equation", "Calculate", "Calculate the area", "What is the sum of", "Find the",
    "Find the value of", "Simplify", "Evaluate", "A store sells", "A farmer has", "A train travels", "A car travels at",
    "A school has", "A baker makes", "A rectangle has", "A recipe calls for", "A box contains", "A company",
    "A book costs",
    "There are", "If a", "If you have", "If there are", "How many", "How much", "How long will it take", "Each", "Two",
    "What is 15% of", "The price of", "The sum of", "In a class of", "On Monday,", "Every day,", "At a party",
    "The ratio",
    "A number is", "A bag contains", "A tank can", "A worker earns", "What is the probability", "Convert", "Compute",
    "Add", "Multiply", "Divide", "What is the average of", "Jenny wants to buy", "Three friends", "Half of the",
    *(f"{name} has" for name in NAMES), *(f"{name} buys" for name in NAMES), *(f"{name} is" for name in NAMES[:14]),
    *(f"{name} wants" for name in NAMES[14:]), *(f"If {name}" for name in NAMES[:8]),
)  # fmt: skip

PLAIN = (
    "",
    "The",
    "In",
    "It",
    "A",
    "This",
    "When",
    "We",
    "There",
    "1.",
    "#",
    "def ",
    "import ",
    "Q:",
    "Once upon a time",
)

# Mostly none, so that the template's own system message stands, as it does for most users.
SYSTEMS = (
    *("",) * 34, "You are a helpful assistant.", "You are a helpful AI assistant.",
    "You are a careful programmer. Answer with code.", "You are a mathematics tutor. Show each step.",
    "You are a friendly expert who answers briefly.", "You are a creative writer.",
)  # fmt: skip

BY_KIND: Mapping[str, tuple[str, ...]] = {"chat": CHAT, "code": (*CODE, *FIRST_WORDS * 4), "math": MATH}
