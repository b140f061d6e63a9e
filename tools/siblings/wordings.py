"""How each task is worded: `Wordings(train, test)`, never the same wording on both sides.

The test side uses words that the train side uses too, in other sentences. Data only.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wordings:
    train: tuple[str, ...]
    test: tuple[str, ...]

    def of(self, split: str) -> tuple[str, ...]:
        return self.train if split == "train" else self.test


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small assistant. Be brief.",
    "Answer the question.",
    "You are Penny, a tiny model.",
)

# Put before or after any wording of a task, on both sides.
OPENERS = ("", "", "", "Please help. ", "Hello! ", "Quick question: ", "Hi, ", "A task for you: ")
CLOSERS = ("", "", "", " Thanks.", " Thank you!", " Please.")

ARITHMETIC = {
    "+": Wordings(
        train=(
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "Compute {a} plus {b}.",
            "Calculate {a} + {b}.",
            "What do you get if you add {b} to {a}?",
            "{a} + {b} = ?",
            "Find the sum of {a} and {b}.",
            "How much is {a} plus {b}?",
            "Work out {a} + {b} step by step.",
            "Give me the sum {a} + {b}.",
        ),
        test=(
            "Can you add {a} and {b}?",
            "What is the sum of {a} and {b}?",
            "Work out {a} plus {b}.",
        ),
    ),
    "-": Wordings(
        train=(
            "What is {a} - {b}?",
            "Subtract {b} from {a}.",
            "Compute {a} minus {b}.",
            "Calculate {a} - {b}.",
            "What do you get if you take {b} from {a}?",
            "{a} - {b} = ?",
            "Find the difference of {a} and {b}.",
            "How much is {a} minus {b}?",
            "Work out {a} - {b} step by step.",
            "Give me the difference {a} - {b}.",
        ),
        test=(
            "Can you subtract {b} from {a}?",
            "What is the difference of {a} and {b}?",
            "Work out {a} minus {b}.",
        ),
    ),
    "*": Wordings(
        train=(
            "What is {a} * {b}?",
            "Multiply {a} by {b}.",
            "Compute {a} times {b}.",
            "Calculate {a} * {b}.",
            "What do you get if you multiply {a} by {b}?",
            "{a} * {b} = ?",
            "Find the product of {a} and {b}.",
            "How much is {a} times {b}?",
            "Work out {a} * {b} step by step.",
            "Give me the product {a} * {b}.",
        ),
        test=(
            "Can you multiply {a} by {b}?",
            "What is the product of {a} and {b}?",
            "Work out {a} times {b}.",
        ),
    ),
}

SORT_UP = Wordings(
    train=(
        "Sort these numbers: {list}",
        "Put these in order: {list}",
        "Sort from small to large: {list}",
        "Order the list {list}",
        "Arrange the numbers {list} from smallest to largest.",
        "Sort {list}",
        "Sort the list in ascending order: {list}",
        "Write these numbers in ascending order: {list}",
        "Here is a list: {list}. Sort it.",
    ),
    test=(
        "Can you sort these numbers from smallest to largest? {list}",
        "Here are numbers: {list}. Put them in order.",
        "Arrange in ascending order: {list}",
    ),
)
SORT_DOWN = Wordings(
    train=(
        "Sort from large to small: {list}",
        "Arrange the numbers {list} from largest to smallest.",
        "Sort the list in descending order: {list}",
        "Write these numbers in descending order: {list}",
        "Here is a list: {list}. Sort it in descending order.",
        "Put these in order from largest to smallest: {list}",
    ),
    test=(
        "Can you sort these numbers from largest to smallest? {list}",
        "Arrange in descending order: {list}",
    ),
)

COPY = Wordings(
    train=(
        "Repeat: {text}",
        "Copy this: {text}",
        "Say exactly: {text}",
        "Repeat after me: {text}",
        "Echo the text: {text}",
        "Write this again: {text}",
        "Copy the following text: {text}",
        "Say it back: {text}",
    ),
    test=(
        "Please repeat this text: {text}",
        "Copy exactly: {text}",
        "Write the following again: {text}",
    ),
)
SPELL = Wordings(
    train=(
        "Spell {word}.",
        "Spell the word {word}.",
        "How do you spell {word}?",
        "Write the letters of {word}.",
        "Give me the letters of the word {word}.",
    ),
    test=("Can you spell the word {word}?", "What are the letters of {word}?"),
)

COUNT_LETTERS = Wordings(
    train=(
        "How many letters does {word} have?",
        "Count the letters in {word}.",
        "How many letters are in the word {word}?",
        "Number of letters in {word}?",
        "Count the letters of the word {word}.",
    ),
    test=("Can you count the letters in {word}?", "How many letters has the word {word}?"),
)
COUNT_LETTER = Wordings(
    train=(
        "How many times does {letter} occur in {word}?",
        "Count the letter {letter} in {word}.",
        "How many {letter} are in the word {word}?",
        "How often is {letter} in {word}?",
        "Count how often {letter} occurs in {word}.",
    ),
    test=(
        "Can you count the letter {letter} in {word}?",
        "How often does {letter} occur in {word}?",
    ),
)
COUNT_WORDS = Wordings(
    train=(
        "How many words are here: {text}",
        "Count the words: {text}",
        "Count these words: {text}",
        "How many words does this have: {text}",
        "Number of words in: {text}",
    ),
    test=("Can you count the words here: {text}", "How many words are in: {text}"),
)

FACT_QUESTIONS = {
    "capital": Wordings(
        train=(
            "What is the capital of {key}?",
            "Name the capital of {key}.",
            "Which city is the capital of {key}?",
            "Tell me the capital city of {key}.",
            "What is {key}'s capital?",
            "The capital of {key}?",
            "I want to know the capital of {key}.",
            "What is the name of the capital of {key}?",
        ),
        test=(
            "Can you tell me the capital of {key}?",
            "Which city is {key}'s capital?",
            "Do you know the capital city of {key}?",
        ),
    ),
    "colour": Wordings(
        train=(
            "What colour is {key}?",
            "Name the colour of {key}.",
            "Which colour does {key} have?",
            "Tell me the colour of {key}.",
            "What is the colour of {key}?",
            "The colour of {key}?",
            "I want to know the colour of {key}.",
        ),
        test=(
            "Can you tell me the colour of {key}?",
            "Which colour is {key}?",
            "Do you know what colour {key} has?",
        ),
    ),
    "young": Wordings(
        train=(
            "What is the young of {key} called?",
            "Name the young of {key}.",
            "What do you call a young one of {key}?",
            "Tell me the name of the young of {key}.",
            "The young of {key}?",
            "I want to know what the young of {key} is.",
        ),
        test=(
            "Can you tell me the young of {key}?",
            "What do you call the young of {key}?",
            "Do you know what the young of {key} is called?",
        ),
    ),
    "legs": Wordings(
        train=(
            "How many legs does {key} have?",
            "Name the number of legs of {key}.",
            "What is the number of legs of {key}?",
            "Tell me how many legs {key} has.",
            "The number of legs of {key}?",
            "I want to know the number of legs of {key}.",
        ),
        test=(
            "Can you tell me how many legs {key} has?",
            "Do you know the number of legs of {key}?",
        ),
    ),
    "opposite": Wordings(
        train=(
            "What is the opposite of {key}?",
            "Name the opposite of {key}.",
            "Which word is the opposite of {key}?",
            "Tell me the opposite of {key}.",
            "The opposite of {key}?",
            "I want to know the opposite of {key}.",
        ),
        test=(
            "Can you tell me the opposite of {key}?",
            "Do you know the opposite word of {key}?",
        ),
    ),
}
FOLLOW_UPS = Wordings(
    train=("And of {key}?", "And {key}?", "What about {key}?", "The same for {key}.", "Now {key}?"),
    test=("And what about {key}?", "Now the same for {key}?"),
)

PROBLEMS = {
    "+": Wordings(
        train=(
            "{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?",
            "{name} finds {a} {item} on {day} and {b} {item} later. "
            "How many {item} did {name} find?",
            "There are {a} {item} in a box. {name} adds {b} more. How many {item} are in the box?",
            "{name} has {a} {item}. {other} gives {name} {b} {item}. "
            "How many {item} does {name} have now?",
            "{name} sold {a} {item} and {other} sold {b} {item}. How many {item} did they sell?",
        ),
        test=(
            "{name} had {a} {item} and got {b} more. How many {item} does {name} have now?",
            "{name} has {a} {item} and {other} has {b} {item}. How many {item} do they have?",
        ),
    ),
    "-": Wordings(
        train=(
            "{name} has {a} {item} and loses {b}. How many {item} are left?",
            "There were {a} {item} in a box. {name} took {b} out. How many {item} are left?",
            "{name} had {a} {item} and gave {b} to {other}. How many {item} does {name} have left?",
            "{name} baked {a} cakes and sold {b}. How many cakes are left?",
            "A shop had {a} {item} on {day} and sold {b}. How many {item} are left?",
        ),
        test=(
            "{name} has {a} {item} and gives {b} to {other}. How many {item} are left?",
            "A box had {a} {item}. {name} took {b}. How many {item} are left in the box?",
        ),
    ),
    "*": Wordings(
        train=(
            "{name} has {b} boxes with {a} {item} each. How many {item} does {name} have?",
            "There are {a} {item} in each of {b} boxes. How many {item} are there?",
            "{name} buys {a} {item} on each of {b} days. How many {item} did {name} buy?",
            "Each of {b} friends has {a} {item}. How many {item} do they have?",
        ),
        test=(
            "There are {b} boxes with {a} {item} in each. How many {item} are there?",
            "{name} finds {a} {item} on each of {b} days. How many {item} did {name} find?",
        ),
    ),
}

# schema: (sentences, fields in the order of the answer)
JSON_TEXTS = {
    "person": (
        Wordings(
            train=(
                "{name} is {number} years old and lives in {city}.",
                "{name} lives in {city} and is {number} years old.",
                "In {city} lives {name}, who is {number} years old.",
                "My friend {name} from {city} is {number}.",
                "This is {name}, age {number}, from {city}.",
                "{name}, {number}, {city}.",
            ),
            test=(
                "My friend {name} is {number} years old and lives in {city}.",
                "In {city} lives my friend {name}, age {number}.",
            ),
        ),
        ("name", "age", "city"),
    ),
    "order": (
        Wordings(
            train=(
                "{name} orders {number} {item}.",
                "Please send {number} {item} to {name}.",
                "An order of {number} {item} for {name}.",
                "{name} wants to buy {number} {item}.",
                "{number} {item} were bought by {name}.",
            ),
            test=(
                "{name} wants {number} {item}.",
                "Please send an order of {number} {item} to {name}.",
            ),
        ),
        ("name", "item", "count"),
    ),
    "trip": (
        Wordings(
            train=(
                "{name} travels to {city} on {day}.",
                "On {day} {name} goes to {city}.",
                "A trip to {city} on {day} for {name}.",
                "{name} will be in {city} on {day}.",
            ),
            test=(
                "On {day} {name} travels to {city}.",
                "{name} goes on a trip to {city} on {day}.",
            ),
        ),
        ("name", "city", "day"),
    ),
    "stock": (
        Wordings(
            train=(
                "There are {number} {item}.",
                "We have {number} {item} here.",
                "{item}: {number}.",
                "The shop has {number} {item}.",
            ),
            test=("The box has {number} {item}.", "There are {number} {item} here."),
        ),
        ("item", "count"),
    ),
}
JSON_ASKS = Wordings(
    train=(
        "Extract {fields} as JSON: {text}",
        "Give {fields} as JSON. Text: {text}",
        "{text} Write {fields} as JSON.",
        "Turn this into JSON with {fields}: {text}",
        "Read the text and answer in JSON with {fields}. {text}",
        "{text} Return JSON with {fields}.",
    ),
    test=(
        "Extract {fields} from the text as JSON. Text: {text}",
        "Return {fields} as JSON: {text}",
    ),
)

TOOL_ASKS = {
    "get_weather": Wordings(
        train=(
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Tell me the weather in {city}.",
            "Is it raining in {city}?",
            "I want to know the weather in {city}.",
        ),
        test=(
            "Can you tell me the weather in {city}?",
            "What is the weather like in {city} today?",
        ),
    ),
    "set_timer": Wordings(
        train=(
            "Set a timer for {number} minutes.",
            "Start a timer of {number} minutes.",
            "Wake me in {number} minutes.",
            "I need a timer for {number} minutes.",
            "Timer, {number} minutes.",
        ),
        test=("Can you start a timer for {number} minutes?", "I need to wake in {number} minutes."),
    ),
    "add_item": Wordings(
        train=(
            "Add {number} {item} to my list.",
            "Put {number} {item} on the list.",
            "I need {number} {item} on my list.",
            "My list needs {number} {item}.",
        ),
        test=("Can you put {number} {item} on my list?", "Add {number} {item} to the list."),
    ),
    "book_table": Wordings(
        train=(
            "Book a table for {number} guests under {name}.",
            "Table for {number} guests, name {name}.",
            "I want a table for {number} guests. My name is {name}.",
            "Please book for {name}, {number} guests.",
        ),
        test=(
            "Can you book a table for {number} guests? My name is {name}.",
            "Book for {number} guests under {name}.",
        ),
    ),
    "send_note": Wordings(
        train=(
            "Send a note to {name} on {day}.",
            "On {day} send {name} a note.",
            "{name} must get a note on {day}.",
            "I want to send a note to {name} on {day}.",
        ),
        test=("Can you send {name} a note on {day}?", "On {day} send a note to {name}."),
    ),
}

THINK_ASKS = Wordings(
    train=(
        "Think first. {task}",
        "{task} Think before you answer.",
        "{task} /think",
        "Think step by step. {task}",
        "{task} Take time to think.",
        "/think {task}",
    ),
    test=("Think before you answer. {task}", "{task} Think first.", "Take time to think. {task}"),
)
THINK_SYSTEMS = ("Think before you answer.", "Think first, then answer.", "/think")
NO_THINK_ASKS = Wordings(
    train=("{task} /no_think", "/no_think {task}"),
    test=("{task} Thanks. /no_think", "/no_think Quick question: {task}"),
)

STORY = Wordings(
    train=(
        "Tell me a story about a {hero} and a {thing} in the {place}.",
        "Write a short story: {hero}, {thing}, {place}.",
        "A story about a {hero} who finds a {thing} in the {place}.",
        "Write a story about a {hero} in the {place} and a {thing}.",
        "I want a story with a {hero}, a {thing} and the {place}.",
    ),
    test=(
        "Write me a story about a {hero} and a {thing} in the {place}.",
        "Tell a short story with a {hero}, a {thing} and the {place}.",
    ),
)

CHAT = {
    "Hello! How can I help you?": Wordings(
        train=("Hello!", "Hi!", "Hi there!", "Good morning!", "Hello there."),
        test=("Hi, hello!", "Hello, good morning!"),
    ),
    "I am Penny, a tiny model that tests Penstock.": Wordings(
        train=("Who are you?", "What are you?", "What is your name?", "Tell me who you are."),
        test=("Can you tell me who you are?", "Tell me your name."),
    ),
    "I can add, sort, copy, count, answer facts and write JSON.": Wordings(
        train=("What can you do?", "How can you help me?", "What do you know?", "Help!"),
        test=("Tell me what you can do.", "Can you help me?"),
    ),
    "Goodbye! Have a nice day.": Wordings(
        train=("Bye!", "Goodbye!", "See you!", "Bye, thanks."),
        test=("Goodbye, see you!", "Thanks, bye!"),
    ),
}
