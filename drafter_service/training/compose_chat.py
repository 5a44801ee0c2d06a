"""Which chat instructions can be put together from parts?

Templates of eight kinds (writing, role play, extraction and rewriting, comparing, step by step, sciences, humanities,
advice) over lists of topics, people, places and styles: far more than a training run asks. All written for this
project; no evaluation prompt is among them.
"""

from __future__ import annotations

import random

TOPICS = (
    "climate change", "solar panels", "electric cars", "the water cycle", "photosynthesis", "black holes", "vaccines",
    "machine learning", "blockchain", "the stock market", "inflation", "supply and demand", "compound interest",
    "gravity", "plate tectonics", "volcanoes", "earthquakes", "DNA", "evolution", "antibiotics", "the immune system",
    "sleep", "meditation", "yoga", "strength training", "a balanced diet", "coffee", "chocolate", "bread baking",
    "remote work", "time management", "public speaking", "job interviews", "teamwork", "leadership", "negotiation",
    "online privacy", "passwords", "cloud computing", "databases", "open source software", "video games", "chess",
    "football", "the Olympic Games", "jazz music", "classical music", "photography", "painting", "poetry", "the novel",
    "ancient Egypt", "the Roman Empire", "the Renaissance", "the French Revolution", "the Industrial Revolution",
    "the Second World War", "the Cold War", "the Silk Road", "the printing press", "democracy", "human rights",
    "the United Nations", "globalization", "urban planning", "public transport", "recycling", "plastic pollution",
    "coral reefs", "rainforests", "whales", "bees", "wolves", "cats", "dogs", "gardening", "houseplants", "bicycles",
    "trains", "space travel", "Mars", "the Moon", "telescopes", "nuclear energy", "wind power", "batteries",
    "quantum computing", "the internet", "social media", "artificial intelligence in medicine", "self-driving cars",
    "3D printing", "robotics", "genetic engineering", "stem cells", "the human brain", "memory", "language learning",
    "translation", "philosophy of mind", "stoicism", "ethics", "justice", "happiness", "friendship",
    "family traditions",
    "weddings", "holidays", "festivals", "Japanese culture", "Italian food", "Indian history", "African art",
    "Latin American literature", "minimalism", "personal finance", "student loans", "buying a house", "taxes",
    "insurance", "small businesses", "startups", "marketing", "customer service", "e-commerce", "supply chains",
    "agriculture", "organic farming", "water scarcity", "migration", "education", "libraries", "museums", "theatre",
    "film making", "fashion", "architecture", "bridges", "oceans", "rivers", "deserts", "weather forecasting",
    "chemical reactions", "acids and bases", "electricity", "magnetism", "sound waves", "light", "thermodynamics",
    "probability", "statistics", "prime numbers", "geometry", "cryptography", "sorting algorithms", "data structures",
    "networking", "operating systems", "web design", "user interfaces", "project management", "stress", "anxiety",
    "parenting", "pets", "volunteering", "travel on a budget", "camping", "hiking", "swimming", "running a marathon",
)  # fmt: skip

PLACES = (
    "Paris", "Tokyo", "New York", "London", "Rome", "Barcelona", "Cairo", "Sydney", "Iceland", "Peru", "Kenya",
    "Norway",
    "Thailand", "Canada", "Mexico City", "Istanbul", "Lisbon", "Vienna", "Singapore", "Cape Town", "Costa Rica",
    "Scotland", "New Zealand", "Morocco", "Greece", "a small village", "the mountains", "the seaside", "a big city",
)  # fmt: skip

PEOPLE = (
    "a friend", "your boss", "a customer", "a colleague", "a professor", "a landlord", "a neighbour", "a recruiter",
    "a client", "a teacher", "the team", "a supplier", "a new employee", "an investor", "your grandmother",
    "the city council", "a hotel", "an airline", "a doctor", "a local newspaper",
)  # fmt: skip

MATTERS = (
    "a delayed delivery", "a day off next Friday", "a missed meeting", "the results of a project", "a new schedule",
    "a job offer", "a refund", "feedback on a presentation", "a broken heater", "a birthday party", "a change of plans",
    "a partnership", "the launch of a product", "a training course", "a conference", "a thank you for their help",
    "a complaint about noise", "an invitation to lunch", "a question about an invoice", "a letter of recommendation",
    "a resignation", "a raise", "an upcoming deadline", "a team outing", "a budget for next year",
)  # fmt: skip

ROLES = (
    "a travel guide", "a chef", "a doctor", "a detective", "a history teacher", "a science teacher", "a pirate",
    "a poet", "a life coach", "a personal trainer", "a software engineer", "a lawyer", "an economist", "an astronaut",
    "a librarian", "a wizard", "a journalist", "a gardener", "a stand-up comedian", "a philosopher", "a museum guide",
    "an interviewer", "a robot", "a time traveller", "a king", "an old sailor", "a mathematician", "a psychologist",
)  # fmt: skip

FAMOUS = (
    "Albert Einstein", "Marie Curie", "Leonardo da Vinci", "Cleopatra", "Isaac Newton", "Ada Lovelace", "Shakespeare",
    "Nikola Tesla", "Charles Darwin", "Galileo", "Mozart", "Nelson Mandela", "Aristotle", "Jane Austen", "Mark Twain",
)  # fmt: skip

STYLES = (
    "", "", "", "", " Keep it short.", " Use simple words.", " Be specific.", " Give examples.", " Use bullet points.",
    " Write at least three paragraphs.", " In no more than 100 words.", " Include a title.", " Be creative.",
    " Make it funny.", " Use a formal tone.", " Use a friendly tone.", " Explain your reasoning.",
    " Limit yourself to five points.", " Assume that the reader is a beginner.", " End with a question.",
)  # fmt: skip

CHARACTERS = (
    "a lonely robot", "a brave girl", "a lost dog", "two old friends", "a retired teacher", "a young inventor",
    "a talking tree", "a clumsy dragon", "a night watchman", "a painter who cannot see colours", "a group of hikers",
    "a stranger on a train", "a lighthouse keeper", "a boy with a secret", "a baker", "a spaceship crew",
)  # fmt: skip

HAPPENINGS = (
    "finds a hidden door", "discovers an old letter", "gets lost in a storm", "learns to forgive", "saves the town",
    "meets someone from the past", "has to make a difficult choice", "travels to another world", "builds a machine",
    "loses everything and starts again", "wins an unusual contest", "hears a strange sound every night",
)  # fmt: skip

SENTENCES = (
    "The meeting have been moved to next week because of the manager is ill.",
    "The company reported revenues of 4.2 million dollars in 2019, 5.1 million in 2020 and 6.3 million in 2021.",
    "The new phone has a brilliant screen, but the battery hardly lasts a day and the camera is slow.",
    "Maria Lopez, born in Madrid in 1975, founded her first company at the age of 23 and sold it ten years later.",
    "I went to the shop yesterday and buyed some apples, but they was not fresh.",
    "The committee, which had been established in March, decided after long discussions to postpone the vote.",
    "Although the restaurant was crowded, the staff stayed polite and our food came within twenty minutes.",
    "Water boils at 100 degrees Celsius at sea level, and at about 93 degrees at an altitude of 2,000 metres.",
    "The library opens at nine on weekdays and at ten on Saturdays; it is closed on Sundays and holidays.",
    "Our flight to Oslo was cancelled twice, the hotel lost our booking, and still it was the best trip of the year.",
    "Researchers at the university found that short walks after lunch improved concentration in most participants.",
    "The train leaves Berlin at 8:15, stops in Leipzig at 9:30 and reaches Munich at 12:45.",
    "The film is beautifully shot, yet the story drags and the ending leaves too many questions open.",
    "She has worked as a nurse for twelve years, speaks three languages and would like to move into teaching.",
    "In 1969 Neil Armstrong became the first person to walk on the Moon, followed by Buzz Aldrin.",
    "The farm sells apples, pears and plums in autumn, and strawberries and cherries in early summer.",
)  # fmt: skip

TEMPLATES = (
    "Explain {topic} to {audience}.{style}", "What is {topic} and why does it matter?{style}",
    "What are the main advantages and disadvantages of {topic}?{style}", "How does {topic} affect our daily lives?",
    "Describe the history of {topic}.{style}", "Write a short essay about {topic}.{style}",
    "Write a blog post about {topic}.{style}", "Write an engaging introduction to an article about {topic}.",
    "Give me five tips about {topic}.{style}", "List ten interesting facts about {topic}.",
    "What are common misconceptions about {topic}?", "Compare {topic} and {topic2}.{style}",
    "What is the relationship between {topic} and {topic2}?{style}", "Discuss the impact of {topic} on society.{style}",
    "Write a persuasive speech about {topic}.{style}", "Outline a lesson plan about {topic} for {audience}.",
    "Create a quiz with five questions about {topic}, with answers.", "Write a poem about {topic}.{style}",
    "Summarize what you know about {topic} in three sentences.", "Why is {topic} important?{style}",
    "What would the world look like without {topic}?{style}", "How can a beginner get started with {topic}?{style}",
    "What questions should I ask an expert on {topic}?", "Explain the basic principles of {topic} step by step.{style}",
    "What are the ethical questions around {topic}?{style}",
    "Write a dialogue between two people about {topic}.{style}",
    "Suggest three research questions about {topic} and explain how you would study them.",
    "How has {topic} changed over the last hundred years?{style}", "Provide arguments for and against {topic}.{style}",
    "Write an email to {person} about {matter}.{style}",
    "Draft a professional email to {person} about {matter}.{style}",
    "Compose a polite letter to {person} concerning {matter}.{style}",
    "Write a short message to {person} about {matter}. Keep it friendly and to the point.",
    "Plan a {number}-day trip to {place}.{style}", "Write a travel blog post about a trip to {place}.{style}",
    "What should I see in {place}?{style}", "Describe {place} for someone who has never been there.{style}",
    "Write a short story about {character} who {happening}.{style}",
    "Write the opening paragraph of a story in which {character} {happening}.{style}",
    "Write a story of about {number}00 words about {character} who {happening}, set in {place}.",
    "Pretend to be {role} and answer this question: what do you think about {topic}?{style}",
    "Imagine you are {role}. Introduce yourself and explain {topic}.{style}",
    "Act as {role}. I will ask you questions. My first question is: how should I start with {topic}?",
    "Take on the role of {famous} and explain {topic} in your own words.{style}",
    "You are {role}. A visitor asks you about {topic}. What do you say?{style}",
    "Imagine you are {famous}. What would you say about {topic}?{style}",
    "Correct the grammar of the following text.\n\n{sentence}",
    "Summarize the following text.\n\n{sentence} {sentence2}",
    "Rewrite the following sentence in a {tone} tone.\n\n{sentence}",
    "Extract all names, dates and numbers from the following text as a list.\n\n{sentence} {sentence2}",
    "Turn the following text into bullet points.\n\n{sentence} {sentence2} {sentence3}",
    "Is the following text positive, negative or neutral? Explain.\n\n{sentence}",
    "Read the text and answer the question.\n\n{sentence} {sentence2}\n\nWhat is the main point?",
    "Write three questions that the following text answers.\n\n{sentence} {sentence2}",
    "Return the facts in this text as JSON.\n\n{sentence} {sentence2}",
    "Explain the difference between {topic} and {topic2} to {audience}.{style}",
    "I am worried about {topic}. What should I do?{style}", "I want to learn about {topic}. Where do I start?{style}",
    "My friend says that {topic} is a waste of time. How can I answer?{style}",
    "Write a product description for something that has to do with {topic}.{style}",
    "Write a headline and a short news report about {topic} in {place}.{style}",
    "Propose a business idea that combines {topic} and {topic2}.{style}",
    "Give me a schedule for a week that leaves time for {topic} and {topic2}.",
    "What are the most important inventions related to {topic}?{style}",
    "Describe a typical day in the life of {role}.{style}", "What qualities does {role} need?{style}",
    "Who was {famous}?{style}", "What is {famous} best known for?{style}",
    "If you could change one thing about {topic}, what would it be?{style}",
    "Create a table that compares {topic} and {topic2}.", "Define {topic} in one sentence, then give two examples.",
)  # fmt: skip

AUDIENCES = (
    "a child", "a ten-year-old", "a high school student", "a beginner", "an expert", "my grandmother", "a visitor",
    "someone with no background", "a group of students", "a business owner",
)  # fmt: skip
TONES = ("formal", "friendly", "funny", "neutral", "more confident", "simpler", "poetic", "more polite")

FOLLOW_UPS = (
    "Make it shorter.", "Can you explain that in simpler words?", "Rewrite your answer as a list.", "Give an example.",
    "Now write it as a poem.", "Rewrite your previous answer in a more formal tone.", "What are the drawbacks?",
    "Summarize your answer in one sentence.", "Add more detail to the second point.", "Why?", "Are you sure?",
    "Translate your answer into plain language for a child.", "Now take the opposite view.",
    "What would an expert add?",
    "Rewrite it without using the word \"the\".", "Begin every sentence with the same letter.",
    "Critique your own answer.", "Can you give me three alternatives?", "What should I do next?", "Tell me more.",
    "Turn it into an email.", "Turn it into a short story.", "How would the answer change in {place}?",
    "Explain how this relates to {topic}.", "Now do the same for {topic}.", "Write a title for it.",
    "List the key terms and define each.", "What assumptions did you make?", "Put it into a table.",
    "Use metaphors in every sentence.", "Rephrase it in the voice of {role}.", "How could it be improved?",
    "Explain the last part again, step by step.", "Give me a counterexample.", "Which of these is the most important?",
    "What if the budget is cut in half?", "How long would that take?", "Now limit it to four sentences.",
    "Add a short introduction and a conclusion.", "Thanks! Can you also write some questions about this?",
)  # fmt: skip


def chat_prompt(rng: random.Random) -> str:
    """One instruction."""
    return _filled(rng.choice(TEMPLATES), rng)


def follow_up(rng: random.Random) -> str:
    """What a user might say after an answer."""
    return _filled(rng.choice(FOLLOW_UPS), rng)


def _filled(template: str, rng: random.Random) -> str:
    topic, other = rng.sample(TOPICS, 2)
    sentences = rng.sample(SENTENCES, 3)
    return template.format(
        topic=topic, topic2=other, style=rng.choice(STYLES), audience=rng.choice(AUDIENCES), place=rng.choice(PLACES),
        person=rng.choice(PEOPLE), matter=rng.choice(MATTERS), role=rng.choice(ROLES), famous=rng.choice(FAMOUS),
        character=rng.choice(CHARACTERS), happening=rng.choice(HAPPENINGS), number=rng.randint(2, 9),
        tone=rng.choice(TONES), sentence=sentences[0], sentence2=sentences[1], sentence3=sentences[2],
    )  # fmt: skip
