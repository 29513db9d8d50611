"""What the target is asked while the text is made that drafters are trained on.

Owns the prompts: a fixed, seeded mixture of explanations, stories, lists, letters, short questions, code, and texts to be
repeated or rearranged. None is a prompt of the benchmark. Called by `tools.train_drafter`.
"""

import itertools
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
    "balloons", "the theatre", "salt", "the alphabet", "postage stamps", "trains", "cooking rice", "the lungs", "steel",
    "street markets", "the night sky", "rain forests", "dolphins", "the calendar", "coffee", "anger", "homework", "umbrellas",
    "running a small shop", "public transport", "the stomach", "teaching children to read", "winter tyres", "bread",
    "the Roman aqueducts", "folk music", "lightning", "the desert fox", "photography", "the periodic table", "tides",
    "credit cards", "hiking boots", "the brain", "fractions", "elections", "the internet", "passwords", "medieval castles",
    "potatoes", "jazz", "the Vikings", "stress at work", "the bicycle", "the greenhouse effect", "owls", "mushrooms",
    "losing weight", "learning to drive", "the piano tuner", "a lost dog", "a haunted house", "the last day of school",
    "a trip to Mars", "an old clockmaker", "a talking tree", "probability", "triangles", "percentages", "the speed of light",
    "algorithms", "machine learning", "spreadsheets", "backing up files", "email", "open source software", "web browsers",
    "sound", "colours", "mirrors", "the five senses", "dreams", "courage", "loneliness", "generosity", "patience",
    "making a budget", "renting a flat", "writing a CV", "asking for a raise", "public speaking", "learning to cook",
    "growing herbs on a balcony", "house plants", "dogs", "horses", "elephants", "penguins", "spiders", "whales", "wolves",
    "the Amazon river", "the Sahara", "Mount Everest", "Antarctica", "the Great Wall", "the pyramids", "Shakespeare",
    "Mozart", "Marie Curie", "Isaac Newton", "the French Revolution", "the Renaissance", "the first railway", "sailing ships",
    "football", "tennis", "yoga", "marathons", "board games", "crossword puzzles", "origami", "pottery", "gardening",
    "bicycles in the city", "noise", "plastic", "batteries", "nuclear energy", "weather forecasts", "hurricanes", "glaciers",
    "soil", "seeds", "vitamins", "sugar", "headaches", "the flu", "washing hands", "teeth", "glasses", "shoes", "cotton",
    "paper money", "taxes", "insurance", "contracts", "the police", "hospitals", "kindergartens", "universities", "letters",
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
    "I know nothing about {topic}. Where should I start?", "Write the first page of a book about {topic}.",
    "Can you help me understand {topic}?", "What would the world be like without {topic}?", "Write a song about {topic}.",
    "Name some famous people connected with {topic}.", "I don't like {topic}. Am I alone with that?",
    "Compare {topic} with {other}.", "Write a letter to the editor about {topic}.", "How much does {topic} cost?",
    "Write a quiz of four questions with answers about {topic}.", "Explain {topic} step by step.",
    "What will {topic} be like in a hundred years?", "Write a speech about {topic} for a school.",
    "Give me three arguments for and three against {topic}.", "Write a review of a book about {topic}.",
    "Make a table of the most important dates of {topic}.", "Is {topic} dangerous?", "Define {topic} in one sentence.",
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
    "draws a circle", "simulates rolling two dice", "keeps a list of contacts", "computes the area of a triangle",
    "reads a JSON file and prints its keys", "sends an HTTP request", "finds the shortest word in a sentence",
    "implements a stack with push and pop", "implements a queue as a class", "searches a sorted list by halving it",
    "converts a number to binary", "prints the Fibonacci numbers below 100", "validates an email address",
    "splits a list into parts of equal size", "measures how long a function takes", "plays rock, paper, scissors",
    "transposes a matrix", "counts down from ten", "replaces spaces with underscores", "finds all files of a folder",
    "computes compound interest", "checks whether a year is a leap year", "groups words by their first letter",
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
    "The council decided to spend {count} thousand euros on {topic}.", "A new school was opened near the river in May.",
    "{name} sold the car because the petrol had become too expensive.", "There were {count} people at the meeting.",
    "The {job} said that {topic} had always been a dream of the family.", "After the rain the road was closed for {count} days.",
    "{other} found {count} old photographs in a box under the stairs.", "The film about {topic} begins at {hour}.",
    "Most of the visitors come from {place} and stay for {count} nights.", "{name} has never been to {place}.",
)  # fmt: skip


RENAMED = (("Stack", "Pile"), ("Account", "Ledger"), ("Timer", "StopWatch"), ("Cart", "Basket"), ("Queue", "Line"))
CLASSES = (
    "Rename the class {old} to {new} in this code.\n\n{code}", "Add a comment to every method.\n\n{code}",
    "Explain what this class does.\n\n{code}", "Add type hints to this code. Output only the code.\n\n{code}",
)  # fmt: skip
METHODS = (
    "    def {verb}(self, {noun}):\n        self.{noun}s.append({noun})\n",
    "    def {verb}_all(self):\n        self.{noun}s = []\n",
    "    def {verb}_last(self):\n        if not self.{noun}s:\n            return None\n        return self.{noun}s.pop()\n",
    "    def count(self):\n        return len(self.{noun}s)\n",
    "    def {verb}_if(self, limit):\n        self.{noun}s = [x for x in self.{noun}s if x < limit]\n        return self.{noun}s\n",
)  # fmt: skip
VERBS, NOUNS = ("add", "push", "drop", "take", "store"), ("item", "value", "price", "entry", "event")


def training_prompts(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts, the same for the same seed. The first ones are as mixed as all of them."""
    source = random.Random(seed)
    kinds = (_about, _about, _code, _about, _repeat, _about, _question, _about, _records, _about, _class)
    prompts: dict[str, None] = {}
    for kind in itertools.cycle(kinds):
        if len(prompts) == count:
            break
        prompts[kind(source)] = None
    return list(prompts)


def _about(source: random.Random) -> str:
    return source.choice(ABOUT).format(topic=source.choice(TOPICS), other=source.choice(TOPICS))


def _code(source: random.Random) -> str:
    return source.choice(CODE).format(task=source.choice(TASKS))


def _question(source: random.Random) -> str:
    return source.choice(QUESTIONS).format(place=source.choice(PLACES))


def _repeat(source: random.Random) -> str:
    sentences = source.sample(SENTENCES, source.randint(3, 8))
    return source.choice(REPEAT).format(text=" ".join(_filled(source, sentence) for sentence in sentences))


def _filled(source: random.Random, sentence: str) -> str:
    name, other = source.sample(NAMES, 2)
    return sentence.format(
        name=name, other=other, job=source.choice(JOBS), topic=source.choice(TOPICS),
        hour=f"{source.randint(5, 11)} o'clock", count=source.randint(2, 40), place=source.choice(PLACES),
    )  # fmt: skip


def _records(source: random.Random) -> str:
    records = [
        {"id": source.randint(1, 999), "name": name, "job": source.choice(JOBS), "city": source.choice(PLACES)}
        for name in source.sample(NAMES, source.randint(2, 5))
    ]
    return source.choice(RECORDS).format(records=json.dumps(records))


def _class(source: random.Random) -> str:
    (old, new), noun = source.choice(RENAMED), source.choice(NOUNS)
    methods = [method.format(verb=source.choice(VERBS), noun=noun) for method in source.sample(METHODS, 3)]
    code = f"class {old}:\n    def __init__(self):\n        self.{noun}s = []\n\n" + "\n".join(methods)
    return source.choice(CLASSES).format(old=old, new=new, code=f"```python\n{code}```")
