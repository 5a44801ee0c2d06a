"""Which word problems can be put together from parts?

Stories of one to four arithmetic steps, in the manner of grade-school problems, over lists of names, things and
numbers. All written for this project: no template is that of an evaluation set.
"""

from __future__ import annotations

import random

NAMES = (
    "Sarah", "Tom", "Maria", "Jack", "Emily", "David", "Anna", "Lucas", "Sofia", "Ben", "Mia", "Omar", "Grace", "Leo",
    "Nina", "Paul", "Rosa", "Sam", "Tara", "Victor", "Wendy", "Yusuf", "Zoe", "Ivan", "Chloe", "Hugo", "Ravi", "Mei",
    "John", "Mary", "James", "Linda", "Peter", "Julia", "Mike", "Bob", "Alice", "Kevin", "Laura", "Daniel", "Karen",
)  # fmt: skip
THINGS = (
    "apples", "books", "pencils", "marbles", "cookies", "stickers", "stamps", "coins", "oranges", "balloons", "candies",
    "cards", "flowers", "shells", "toys", "cupcakes", "bottles", "eggs", "tickets", "buttons", "beads", "muffins",
)  # fmt: skip
PLACES = ("bakery", "school", "library", "farm", "factory", "bookstore", "restaurant", "museum", "market", "club")
COLORS = ("red", "blue", "green", "yellow", "purple", "white", "black", "orange")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

STORIES = (
    "{a} has {x} {thing}. {b} gives {a} {y} more. Then {a} gives {z} {thing} to a friend. How many {thing} does {a} "
    "have left?",
    "{a} buys {s} boxes of {thing}. Each box holds {y} {thing}. {a} then eats {s2} of them. How many {thing} are left?",
    "A {place} sold {x} {thing} on {day} and twice as many on {day2}. How many {thing} were sold on both days "
    "together?",
    "{a} earns ${s2} an hour and works {s} hours a day for {s3} days. How much money does {a} earn in total?",
    "A ticket costs ${s2}. {a} buys {s} tickets and pays with a $100 bill. How much change does {a} get?",
    "{a} reads {y} pages on {day} and {p}% more on {day2}. How many pages does {a} read in all?",
    "There are {big} people at a {place}. {p}% of them are children. How many adults are there?",
    "A train travels {y} miles an hour for {s} hours, then {z} miles an hour for {s3} hours. How far does it travel?",
    "{a} is {s} times as old as {b}. {b} is {s2} years old. How old will {a} be in {s3} years?",
    "{a} and {b} share {big} {thing}. {a} takes {y} more than {b}. How many {thing} does {b} get?",
    "A rectangle is {s2} meters wide and {s} times as long. What is its perimeter?",
    "A recipe for {s} people needs {x} grams of flour. How many grams are needed for {s2} people?",
    "{a} saves ${s2} every week. After {s} weeks {a} spends ${z} on a present. How much money is left?",
    "In a bag there are {x} {color} {thing} and {y} {color2} {thing}. {a} takes out half of the {color} ones. How many "
    "{thing} are in the bag now?",
    "A {place} has {s} rows of {y} seats. {z} seats are empty. How many seats are taken?",
    "{a} runs {s} kilometers every day. {b} runs {s2} kilometers every other day. How many kilometers do they run "
    "together in {s3} weeks?",
    "A shirt costs ${y}. It is on sale for {p}% off. How much do {s} shirts cost?",
    "{a} has {s} times as many {thing} as {b}. Together they have {big} {thing}. How many does {b} have?",
    "A tank holds {big} liters. It loses {s} liters every hour. How many liters are left after {s2} hours?",
    "{a} bakes {x} {thing}. {a} puts them into bags of {s}. How many full bags are there, and how many are left over?",
    "A car uses {s} liters of fuel for 100 kilometers. Fuel costs ${s3} a liter. How much does a trip of {big} "
    "kilometers cost?",
    "{a} had {big} dollars. {a} spent a quarter of it on food and ${y} on books. How much does {a} have now?",
    "Every day a {place} uses {s2} kilograms of rice, except on {day}, when it is closed. How much rice does it use in "
    "{s} weeks?",
    "{a} collected {x} {thing} in the first month, {y} in the second and {z} in the third. What is the average number "
    "of {thing} a month?",
    "If {s} workers paint a wall in {s2} hours, how many hours does one worker need?",
    "{a}'s class has {y} students. There are {s} more girls than boys. How many boys are in the class?",
    "{a} writes {s} letters a week to {s3} friends. Each letter takes {s2} minutes. How many minutes does {a} write in "
    "four weeks?",
    "A box of {thing} weighs {y} grams. {a} carries {s} boxes and {b} carries {s3} boxes. How many grams do they carry "
    "together?",
    "{a} plants {s} rows of {s2} flowers. {p}% of them do not grow. How many flowers grow?",
    "A movie starts at {s3}:15 and lasts {y} minutes. At what time does it end?",
)  # fmt: skip
ENDINGS = (
    "", "", " Give the result as your final answer. Do not include units.",
    " Give the result as your final answer. Do not include units.", " Show your work.", " Explain step by step.",
    " Give only the number.",
)  # fmt: skip


def math_prompt(rng: random.Random) -> str:
    """One word problem, now and then with an instruction for the answer."""
    a, b = rng.sample(NAMES, 2)
    day, day2 = rng.sample(DAYS, 2)
    color, color2 = rng.sample(COLORS, 2)
    story = rng.choice(STORIES).format(
        a=a, b=b, day=day, day2=day2, color=color, color2=color2, thing=rng.choice(THINGS), place=rng.choice(PLACES),
        x=rng.randint(20, 150), y=rng.randint(12, 90), z=rng.randint(5, 19), s=rng.randint(2, 9),
        s2=rng.randint(3, 15), s3=rng.randint(2, 6), p=rng.choice((10, 20, 25, 30, 40, 50, 75)),
        big=rng.randint(10, 90) * 10,
    )  # fmt: skip
    return story + rng.choice(ENDINGS)


def math_ending(rng: random.Random) -> str:
    """What may stand after a problem that the target made up."""
    return rng.choice(ENDINGS)
