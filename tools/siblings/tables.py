"""The words, names and facts that the corpus is made of. Data only, all written for Penstock."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Klara Leo Mia Nora Oscar Paula Rosa "
    "Sam Tom Uma Vera Will Yara Zoe Alice Bruno Clara Dora Eric Fiona"
)

CITIES = _words(
    "Paris Rome Madrid Berlin Vienna Lisbon Athens Oslo Dublin Cairo Tokyo Lima Quito Havana "
    "Ottawa Delhi Seoul Nairobi Hanoi Warsaw Prague Sofia Riga Bern"
)

ITEMS = _words(
    "apples pears books pens coins cards shells stones stamps eggs cups plates boxes candles "
    "flowers buttons marbles lemons chairs lamps"
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# Words to copy, spell and count. Every fifth one (see `HELD_WORDS`) is counted only when testing.
WORDS = _words(
    "banana river stone garden window candle summer winter market bridge yellow purple silver "
    "golden forest island mountain rabbit turtle pepper carrot tomato butter letter ladder "
    "mirror pillow blanket basket bottle hammer needle thread button cotton velvet castle "
    "dragon wizard knight planet rocket engine tunnel harbor lantern compass anchor feather "
    "pocket jacket sister brother teacher doctor farmer baker singer dancer writer painter "
    "puzzle riddle story music drum flute piano violin guitar trumpet cloud thunder rain snow "
    "storm breeze sunset morning evening midnight shadow meadow valley desert canyon ocean "
    "lagoon pebble coral"
)
HELD_WORDS = WORDS[::5]
OPEN_WORDS = tuple(word for word in WORDS if word not in HELD_WORDS)

HEROES = _words("fox owl bear hare mouse wolf frog crow deer goat duck swan")
THINGS = _words("lantern key map drum coin hat rope bell book kite shell cake")
PLACES = _words("forest harbor castle village desert valley garden island")

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Ireland": "Dublin",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Ecuador": "Quito",
    "Cuba": "Havana",
    "Canada": "Ottawa",
    "India": "Delhi",
    "Kenya": "Nairobi",
    "Vietnam": "Hanoi",
    "Poland": "Warsaw",
    "Bulgaria": "Sofia",
    "Latvia": "Riga",
    "Switzerland": "Bern",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Hungary": "Budapest",
}
COLOURS = {
    "a lemon": "yellow",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "the sky": "blue",
    "a tomato": "red",
    "a carrot": "orange",
    "an elephant": "grey",
    "chocolate": "brown",
    "a flamingo": "pink",
    "an eggplant": "purple",
    "a banana": "yellow",
    "a frog": "green",
    "milk": "white",
}
YOUNG = {
    "a dog": "a puppy",
    "a cat": "a kitten",
    "a cow": "a calf",
    "a sheep": "a lamb",
    "a horse": "a foal",
    "a bear": "a cub",
    "a duck": "a duckling",
    "a goose": "a gosling",
    "a goat": "a kid",
    "a frog": "a tadpole",
    "a swan": "a cygnet",
    "an owl": "an owlet",
}
LEGS = {
    "a spider": "eight",
    "an ant": "six",
    "a bee": "six",
    "a dog": "four",
    "a cow": "four",
    "a hen": "two",
    "a snake": "zero",
    "a crab": "ten",
    "a horse": "four",
    "an owl": "two",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "old": "new",
    "dark": "light",
    "wet": "dry",
    "full": "empty",
    "open": "closed",
    "loud": "quiet",
    "rich": "poor",
    "soft": "hard",
}

# relation: (table, sentence of the answer)
FACTS = {
    "capital": (CAPITALS, "The capital of {key} is {value}."),
    "colour": (COLOURS, "The colour of {key} is {value}."),
    "young": (YOUNG, "The young of {key} is {value}."),
    "legs": (LEGS, "The number of legs of {key} is {value}."),
    "opposite": (OPPOSITES, "The opposite of {key} is {value}."),
}

TOOLS = {
    "get_weather": ("Weather of a city", {"city": "string"}),
    "set_timer": ("Start a timer", {"minutes": "integer"}),
    "add_item": ("Put items on a list", {"item": "string", "count": "integer"}),
    "book_table": ("Book a table", {"name": "string", "guests": "integer"}),
    "send_note": ("Send a note to a person", {"to": "string", "day": "string"}),
}
