"""What the target is asked while the text is made that drafters are trained on.

Owns the prompts: a fixed, seeded mixture of explanations, stories, lists, letters, short questions, code, and texts to be
repeated or rearranged. None is a prompt of the benchmark. Called by `tools.train_drafter`.
"""

import json
import random

TOPICS = (
    "volcanoes", "the water cycle", "how bicycles stay upright", "the moon and the tides", "keeping bees", "solar panels",
    "the history of paper", "learning the piano", "growing tomatoes", "public libraries", "sleep", "vaccines", "bridges",
    "the invention of the telephone", "coral reefs", "chess", "saving money", "migrating birds", "glass", "earthquakes",
    "working from home", "the metric system", "caring for a cat", "electric cars", "making cheese", "the printing press",
    "deserts", "photosynthesis", "first aid", "writing a diary", "the human heart", "recycling", "magnets", "wind power",
    "ancient Rome", "learning a language", "rivers", "the immune system", "maps", "swimming", "dinosaurs", "clocks",
    "preparing for an interview", "snow", "the stock market", "trees in cities", "computers", "good manners", "lighthouses",
    "how airplanes fly", "honesty", "camping", "black holes", "the violin", "healthy breakfasts", "time management",
    "friendship", "the Silk Road", "databases", "insects", "painting with watercolours", "museums", "gravity", "tea",
    "moving to a new city", "robots", "knitting", "the ocean floor", "democracy", "sharing a flat", "fire safety", "wool",
)  # fmt: skip
ABOUT = (
    "Explain {topic} to somebody who has never heard of it.", "Write a short story in which {topic} plays a part.",
    "Give me five facts about {topic}.", "What are the advantages and disadvantages of {topic}?",
    "Write a poem about {topic}.", "I have to give a talk about {topic}. Can you write an outline?",
    "What should everybody know about {topic}?", "Write a conversation between a teacher and a pupil about {topic}.",
    "Why is {topic} important?", "Make a list of ten questions about {topic}.", "Tell me about {topic}.",
    "Write an email to a friend about {topic}.", "Describe {topic} in three paragraphs.",
    "What is the most common mistake people make about {topic}?", "How did {topic} change over the years?",
    "Write a short newspaper article about {topic}.", "Give me some advice on {topic}.", "Summarize what is known about {topic}.",
)  # fmt: skip
CODE = (
    "Write a Python function that {task}.", "Write a Python function that {task}, and explain it line by line.",
    "How can I write a program that {task}?", "Write a JavaScript function that {task}.",
)  # fmt: skip
TASKS = (
    "reverses a string", "counts the words in a text", "finds the largest number in a list", "sorts a list of names",
    "checks whether a number is prime", "reads a file line by line", "merges two dictionaries", "removes duplicates from a list",
    "computes the factorial of a number", "converts Celsius to Fahrenheit", "finds the common elements of two lists",
    "checks whether a word is a palindrome", "computes the average of a list", "generates a random password",
    "prints the multiplication table", "counts how often each letter occurs", "flattens a nested list", "parses a date",
)  # fmt: skip
QUESTIONS = (
    "What is the capital of {place}?", "Which language do people speak in {place}?", "What is {place} famous for?",
    "Which continent is {place} on?", "What food is typical of {place}?", "Plan a weekend in {place}.",
    "What is the weather like in {place} in winter?", "Name three cities in {place}.",
)  # fmt: skip
PLACES = (
    "France", "Japan", "Brazil", "Egypt", "Canada", "Norway", "India", "Kenya", "Mexico", "Italy", "Greece", "Peru", "Spain",
    "China", "Iceland", "Portugal", "Turkey", "Poland", "Chile", "Morocco", "Vietnam", "Ireland", "Sweden", "Cuba",
)  # fmt: skip
REPEAT = (
    "Repeat the following text word for word.\n\n{text}", "Correct the spelling of this text and write it out in full.\n\n{text}",
    "Copy this text and put every sentence on a line of its own.\n\n{text}", "Rewrite this text in the past tense.\n\n{text}",
    "Summarize this text, using its own sentences.\n\n{text}", "Which person is mentioned first in this text?\n\n{text}",
)  # fmt: skip
RECORDS = (
    "Write these records as a table with one row per record.\n\n{records}", "Turn this JSON into CSV.\n\n{records}",
    "Copy these records, but write the names in capitals.\n\n{records}", "Format this JSON with an indent of four.\n\n{records}",
)  # fmt: skip
NAMES = (
    "Ines",
    "Tomas",
    "Mira",
    "Oskar",
    "Leila",
    "Pavel",
    "Nora",
    "Hugo",
    "Zoe",
    "Emil",
    "Rosa",
    "Ivan",
    "Klara",
    "Sami",
)
JOBS = ("baker", "nurse", "teacher", "driver", "gardener", "plumber", "writer", "painter", "farmer", "cook", "clerk")
SENTENCES = (
    "{name} works as a {job} and gets up at {hour} every day.", "On the way to work {name} buys {count} apples.",
    "{name} and {other} have known each other for {count} years.", "In the evening the {job} reads a book about {topic}.",
    "Last week {name} lost a key and found it again under the table.", "The old house has {count} rooms and a small garden.",
    "{other} wants to learn more about {topic} before the summer.", "At {hour} the market opens and the street fills with people.",
    "Nobody knew why the {job} had left the town so early.", "{name} wrote a letter of {count} pages to {other}.",
)  # fmt: skip


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` prompts, the same for the same seed. The first ones are as mixed as all of them."""
    source = random.Random(seed)
    kinds = (_about, _about, _about, _about, _code, _question, _repeat, _records)
    return [kinds[index % len(kinds)](source) for index in range(count)]


def _about(source: random.Random) -> str:
    return source.choice(ABOUT).format(topic=source.choice(TOPICS))


def _code(source: random.Random) -> str:
    return source.choice(CODE).format(task=source.choice(TASKS))


def _question(source: random.Random) -> str:
    return source.choice(QUESTIONS).format(place=source.choice(PLACES))


def _repeat(source: random.Random) -> str:
    sentences = source.sample(SENTENCES, source.randint(3, 6))
    return source.choice(REPEAT).format(text=" ".join(_filled(source, sentence) for sentence in sentences))


def _filled(source: random.Random, sentence: str) -> str:
    name, other = source.sample(NAMES, 2)
    return sentence.format(
        name=name, other=other, job=source.choice(JOBS), topic=source.choice(TOPICS),
        hour=f"{source.randint(5, 11)} o'clock", count=source.randint(2, 40),
    )  # fmt: skip


def _records(source: random.Random) -> str:
    records = [
        {"id": source.randint(1, 999), "name": name, "job": source.choice(JOBS), "city": source.choice(PLACES)}
        for name in source.sample(NAMES, source.randint(2, 5))
    ]
    return source.choice(RECORDS).format(records=json.dumps(records))
