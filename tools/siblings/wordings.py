"""How each task is worded: small grammars whose wordings are split between training and testing.

A frame such as `"(Add|Sum up) {a} and {b}(.|?)"` stands for every wording that its alternatives can
make. A sixth of all wordings, told by `is_held`, is met only when testing: the same words in
combinations that training never shows. Data, and how to draw from it.
"""

import itertools
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")


def is_held(wording: str) -> bool:
    return zlib.crc32(wording.encode()) % 6 == 0


@cache
def _parts(frame: str) -> tuple[tuple[str, ...], ...]:
    pieces = _CHOICE.split(frame)
    return tuple(
        tuple(piece.split("|")) if i % 2 else (piece,) for i, piece in enumerate(pieces) if piece
    )


@dataclass(frozen=True, slots=True)
class Grammar:
    frames: tuple[str, ...]

    def draw(self, rng: random.Random, split: str) -> str:
        """A wording of the split; frames are equally likely, however many wordings each has."""
        while True:
            parts = _parts(rng.choice(self.frames))
            wording = "".join([part[0] if len(part) == 1 else rng.choice(part) for part in parts])
            if is_held(wording) == (split == "test"):
                return wording

    def all(self, split: str) -> Iterator[str]:
        for frame in self.frames:
            for chosen in itertools.product(*_parts(frame)):
                if is_held(wording := "".join(chosen)) == (split == "test"):
                    yield wording


SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small assistant. Be brief.",
    "Answer the question.",
    "You are Penny, a tiny model.",
    "Be helpful and exact.",
)

# Put before or after any wording of a task, on both sides.
OPENERS = (
    *[""] * 12,
    *("Please help. ", "Hello! ", "Quick question: ", "Hi, ", "A task for you: ", "Hi! "),
    *("I have a question. ", "Next: ", "Okay. ", "Help me. ", "Question: ", "Hey, ", "Please: "),
)
CLOSERS = (
    *[""] * 12,
    *(" Thanks.", " Thank you!", " Please.", " Thanks!", " I need it now.", " Be exact."),
)

_DO = "(Compute|Calculate|Work out|Find|Evaluate|Tell me|Give me|Solve|What is|What's|How much is)"
_CAN = "(Can|Could|Would|Will) you (please |)(compute|calculate|work out|find|tell me|give me)"
_GET = "What (do you get|is the result|comes out|do we have|will I get) (if|when) (you|I|we)"
_WANT = "(I want|I need|I would like|Let me have|Show me|Please give me|Please find)"
_END = "(.|?|)"
_HOW = "(.|?|| step by step.| and show the steps.)"

ARITHMETIC = {
    "+": Grammar(
        (
            f"{_DO} {{a}} (+|plus|added to) {{b}}{_HOW}",
            f"{_DO} the (sum|total) of {{a}} and {{b}}{_HOW}",
            "(Add|Sum|Please add|Add up|Sum up|Now add|Can you add|Could you add|I want to add|"
            f"Let us add|I need to add) (the numbers |){{a}} (and|with|to) {{b}}{_HOW}",
            f"{_GET} (add|sum|add up) {{a}} and {{b}}(?|)",
            "{a} (+|plus) {b} (=|= ?|equals|equals what?|is what?|is?|makes what?|gives?)",
            "(The |)result of {a} (+|plus) {b}(?|.|, please.| is what?)",
            "(The |)(sum|total) of {a} and {b}(?|.|, please.| is what?)",
            f"{_CAN} {{a}} (+|plus) {{b}}(?|)",
            f"{_CAN} the (sum|total) of {{a}} and {{b}}(?|)",
            f"{_WANT} (the sum of {{a}} and {{b}}|{{a}} plus {{b}}|{{a}} + {{b}}){_HOW}",
        )
    ),
    "-": Grammar(
        (
            f"{_DO} {{a}} (-|minus|less) {{b}}{_HOW}",
            f"{_DO} the difference (of|between) {{a}} and {{b}}{_HOW}",
            "(Subtract|Take|Take away|Please subtract|Now subtract|Can you subtract|"
            f"Could you take|I want to subtract|Let us take|I need to take) {{b}} from {{a}}{_HOW}",
            f"{_GET} (subtract|take|take away) {{b}} from {{a}}(?|)",
            "{a} (-|minus) {b} (=|= ?|equals|equals what?|is what?|is?|makes what?|gives?)",
            "(The |)result of {a} (-|minus) {b}(?|.|, please.| is what?)",
            "(The |)difference of {a} and {b}(?|.|, please.| is what?)",
            f"{_CAN} {{a}} (-|minus) {{b}}(?|)",
            f"{_CAN} the difference (of|between) {{a}} and {{b}}(?|)",
            f"{_WANT} (the difference of {{a}} and {{b}}|{{a}} minus {{b}}|{{a}} - {{b}}){_HOW}",
        )
    ),
    "*": Grammar(
        (
            f"{_DO} {{a}} (*|times|multiplied by) {{b}}{_HOW}",
            f"{_DO} the product of {{a}} and {{b}}{_HOW}",
            "(Multiply|Please multiply|Now multiply|Can you multiply|Could you multiply|"
            f"I want to multiply|Let us multiply|I need to multiply) {{a}} (by|with|and) {{b}}"
            f"{_HOW}",
            f"{_GET} multiply {{a}} (by|with|and) {{b}}(?|)",
            "{a} (*|times) {b} (=|= ?|equals|equals what?|is what?|is?|makes what?|gives?)",
            "(The |)result of {a} (*|times) {b}(?|.|, please.| is what?)",
            "(The |)product of {a} and {b}(?|.|, please.| is what?)",
            f"{_CAN} {{a}} (*|times) {{b}}(?|)",
            f"{_CAN} the product of {{a}} and {{b}}(?|)",
            f"{_WANT} (the product of {{a}} and {{b}}|{{a}} times {{b}}|{{a}} * {{b}}){_HOW}",
        )
    ),
}

_SORT = "(Sort|Order|Arrange|Please sort|Please order|Please arrange|Now sort|Now order)"
_SORT_CAN = "(Can|Could|Would|Will) you (please |)(sort|order|arrange)"
_LIST = "(this list|these numbers|the list|the numbers|these|the following numbers)"


def _sorting(order: str, adjective: str) -> Grammar:
    return Grammar(
        (
            f"{_SORT} {_LIST} {order}(:|.|) {{list}}",
            f"{_SORT} {{list}} {order}(.|)",
            f"{_SORT_CAN} {_LIST} {order}(?|:) {{list}}",
            f"{_SORT_CAN} {{list}} {order}(?|)",
            f"(Here is a list|Here are numbers|I have these numbers|Numbers|List|Look)(: |, "
            f"){{list}}"
            f"(. |; ){_SORT} (it|them) {order}(.|, please.|)",
            f"(Put|Write|Give me|Show|Bring|List) {_LIST} {order}: {{list}}",
            f"(Put|Write|Give me|Show|Bring|List) {{list}} {order}(.|)",
            f"{{list}}(: |. |, ){_SORT} (it|them|these) {order}(.|)",
            f"(What is|Give me|Write|Show me|I need|I want) the {adjective} (order|list) of "
            "{list}(?|.|)",
        )
    )


SORT_UP = _sorting(
    "(from small to large|from smallest to largest|in ascending order|in order|in rising order|"
    "from the smallest to the largest|smallest first)",
    "(ascending|sorted|rising)",
)
SORT_DOWN = _sorting(
    "(from large to small|from largest to smallest|in descending order|in falling order|"
    "from the largest to the smallest|largest first)",
    "(descending|falling)",
)

COPY = Grammar(
    (
        "(Repeat|Copy|Say|Echo|Write|Please repeat|Please copy|Now say|Now write|Type|Return)"
        "( this| exactly| the text| this text| the following| the words| what follows|"
        " this exactly| it back| after me|): {text}",
        "(Can|Could|Would|Will) you (please |)(repeat|copy|say|echo|write|return)"
        "( this| exactly| the text| this text| the following|)(:|?) {text}",
        "(I want you to|You must|I need you to|Your task is to|Please just|Just|Only) "
        "(repeat|copy|say|echo|write|return)"
        "( this| the text| this text| the following| exactly|): {text}",
        "(Text|Words|This is the text|Here is the text|Here is a text): {text}"
        "( - | / )(repeat|copy|say|echo|write) it(.| exactly.| back.| again.|)",
    )
)
SPELL = Grammar(
    (
        "(Spell|Please spell|Can you spell|Could you spell|Will you spell|Now spell|I want you to "
        "spell|How do you spell|How do I spell|Show me how to spell)( the word| this word:|) "
        f"{{word}}{_END}",
        "(Write|Give me|Tell me|List|Show me|What are|Name|I want|I need) (the letters|all letters|"
        f"all the letters|every letter) (of|in)( the word|) {{word}}{_END}",
    )
)

_COUNT = "(Count|Please count|Can you count|Could you count|Will you count|Now count|Try to count)"
COUNT_LETTERS = Grammar(
    (
        f"How many letters (does|has|can) (the word |){{word}} (have|got|contain){_END}",
        f"{_COUNT} (the letters|all letters|all the letters|the number of letters) (in|of)"
        f"( the word|) {{word}}{_END}",
        "(How many letters are|Number of letters|The number of letters|What is the number of "
        f"letters|Give me the number of letters) (in|inside)( the word|) {{word}}{_END}",
        f"(How long is|What is the length of|The length of|Give me the length of|Tell me the "
        f"length "
        f"of)( the word|) {{word}}{_END}",
    )
)
COUNT_LETTER = Grammar(
    (
        f"(How many times|How often) (does|do we see|can I find|will I see) (the letter "
        f"|){{letter}}"
        f"( occur| appear| come|) in( the word|) {{word}}{_END}",
        f"{_COUNT} (the letter |how often we see |every |how many times we see ){{letter}} in"
        f"( the word|) {{word}}{_END}",
        f"(How many|The number of|Number of|Give me the number of) (letters |){{letter}} "
        f"(are |)in( the word|) {{word}}{_END}",
    )
)
COUNT_WORDS = Grammar(
    (
        "How many words (are|do you see|can you count|do we have) (here|in this|in the text|"
        "in this text|in the list): {text}",
        f"{_COUNT} (the words|these words|all words|the number of words)( here| in this|"
        " in this text| in the list|): {text}",
        "(Number of words|The number of words|Give me the number of words|What is the number of "
        "words|How many words)( here| in this| in the text|)(:|?) {text}",
        "(Text|Words|List|Here is a text|Here are words): {text}"
        "( - | / )(count|please count|now count) (the words|them|all words)(.|)",
    )
)

_ASK = (
    "(Can|Could|Would|Will) you (please |)(tell me|say|name|give me)",
    "(Tell me|Please tell me|Say|Name|Give me|Please give me|Please name|Write|Now tell me)",
    "(I want to know|I need to know|I would like to know|I wonder|Let me know|I ask you|I need)",
    "(Do you know|Do you remember|Have you learned|Are you able to say|Who knows|Is it known)",
)


def _facts(things: str, questions: tuple[str, ...]) -> Grammar:
    """Things go behind a phrase that asks for them; questions stand alone."""
    asked = tuple(f"{ask} {things} of {{key}}{_END}" for ask in _ASK)
    alone = (
        f"(What is|What's|Which is) {things} of {{key}}(?|, please?|)",
        f"{things} of {{key}}(?|, please.| is?| is what?|: ?)",
    )
    return Grammar((*asked, *alone, *questions))


FACT_QUESTIONS = {
    "capital": _facts(
        "(the capital|the capital city|the name of the capital)",
        (
            "(What|Which) (city|town|place) is (the capital|the capital city) of {key}(?|)",
            "(What is|What's|Tell me|Name|Say|Give me) {key}'s (capital|capital city)(.|?|)",
            "{key} has (what|which) (capital|capital city)(?|)",
        ),
    ),
    "colour": _facts(
        "(the colour|the right colour|the usual colour)",
        (
            "(What|Which) colour (is|has) {key}(?|, please?|)",
            "(What|Which) colour does {key} (have|usually have|show)(?|)",
            "{key} has (what|which) colour(?|)",
        ),
    ),
    "young": _facts(
        "(the young|the baby|the child|the name of the young)",
        (
            "What (do you|do we|do people|can I) call (the young|the baby|the child) of {key}(?|)",
            "(How|What) is (the young|the baby|the child) of {key} (called|named)(?|)",
            "{key} has (what|which) (young|baby|child)(?|)",
        ),
    ),
    "legs": _facts(
        "(the number of legs|the count of legs|the number of the legs)",
        (
            "How many legs (does|can) {key} (have|use)(?|, please?|)",
            "(Tell me|Say|Please tell me|Do you know|I want to know|I wonder|Can you tell me|"
            "Could you say) how many legs {key} has(.|?|)",
            "{key} has how many legs(?|, please?|)",
        ),
    ),
    "opposite": _facts(
        "(the opposite|the opposite word|the reverse)",
        (
            "(What|Which) word (is|means|has) the (opposite|reverse) of {key}(?|)",
            "(What is|What's|Tell me|Say|Name) {key}'s (opposite|opposite word)(.|?|)",
            "{key} has (what|which) (opposite|opposite word)(?|)",
        ),
    ),
}
FOLLOW_UPS = Grammar(
    (
        "(And|And of|What about|And what about|Now|Now of|Then|Next|How about|And how about) {key}"
        "(?|.|, please?|, please.|)",
        "(The same|And the same|Now the same|The same again|Same question|The same question|Again) "
        "(for|with|but for|but with) {key}(?|.|)",
    )
)

PROBLEMS = {
    "+": Grammar(
        (
            "{name} (has|had|owns|finds|holds) {a} {item}(. Then {name}| and then| and| and later) "
            "(buys|gets|finds|wins|collects|makes) {b} more. How many {item} (does {name} have|"
            "are there)( now| in the end| in total| together|)?",
            "{name} (has|finds|sold|bought|made|counted) {a} {item} (and|while) {other} (has|finds|"
            "sold|bought|made|counted) {b}( {item}|). How many {item} (is that|are there|do we get)"
            "( together| in total| in all|)?",
            "(There are|There were|We have|We put) {a} {item} in (a box|a bag|a room|a basket). "
            "{name} (adds|puts in|brings|drops in) {b} more. How many {item} are (there|in it)"
            "( now| then| in total|)?",
            "On {day} {name} (sold|found|bought|made|got) {a} {item}, (later|the next day|then|"
            "after that) {b}( more|). How many {item} (is that|are that)( in total| together| in "
            "all)?",
            "{other} gives {name} {b} {item}. (Before that|Before|Earlier) {name} had {a}( "
            "{item}|). "
            "How many {item} does {name} (have|own|hold)( now| then| in total| together|)?",
        )
    ),
    "-": Grammar(
        (
            "{name} (has|had|owns|holds) {a} {item}(. Then {name}| and then| and| and later) "
            "(loses|sells|drops|eats|breaks|gives away) {b}( of them|). How many {item} "
            "(are left|does {name} have left|remain|does {name} still have)( now| then|)?",
            "(There are|There were|We have|We put) {a} {item} in (a box|a bag|a room|a basket). "
            "{name} (takes|took|removes|picks) {b}( out| of them|). How many {item} (are "
            "left|remain|"
            "are still there)( now| then|)?",
            "{name} had {a} {item} and (gave|sold|lent|sent) {b} to {other}. How many {item} "
            "(are left|does {name} have left|remain|does {name} still have)( now| then|)?",
            "(A shop|A school|A man|A baker) had {a} {item} on {day}(. Then| and then| and) {b} "
            "(were sold|were lost|went away|were stolen). How many {item} (are left|remain|"
            "are still there)( now| then|)?",
            "{b} of (the|these|our) {a} {item} (are|were) (sold|lost|broken|taken). How many "
            "{item} "
            "(are left|remain|are still there)( now| then|)?",
        )
    ),
    "*": Grammar(
        (
            "{name} has {b} (boxes|bags|shelves|baskets) with {a} {item} (each|in each). How many "
            "{item} (does {name} have|are there|is that)( now| in total| in all| together|)?",
            "There are {a} {item} in each of {b} (boxes|bags|rooms|baskets). How many {item} "
            "(are there|is that|do we have)( now| in total| in all| together|)?",
            "{name} (buys|finds|makes|sells|counts) {a} {item} (on each of {b} days|every day "
            "for {b} "
            "days|a day for {b} days). How many {item} (is that|are there)( now| in total| in all|"
            " together|)?",
            "(Each|Every one) of {b} (friends|people|children|men) (has|owns|brings|holds) {a} "
            "{item}."
            " How many {item} (do they have|is that|are there)( now| in total| in all| together|)?",
            "{b} (boxes|bags|shelves|baskets), {a} {item} (in each|in every one|each). How many "
            "{item} "
            "(are there|is that|do we have)( now| in total| in all| together|)?",
        )
    ),
}

# schema: (sentences, fields in the order of the answer)
JSON_TEXTS = {
    "person": (
        Grammar(
            (
                "(My friend |My brother |My guest |Our teacher ||The singer ){name} is {number} "
                "(years old |)(and|but) (lives|works|stays|is) in {city}.",
                "(My friend |My brother |My guest |Our teacher ||The singer ){name} "
                "(lives|works|stays|is) in {city} and is {number}( years old|).",
                "In {city} (lives|works|stays|is) (my friend |my brother |my guest |our teacher "
                "||the "
                "singer ){name}, (who is |age |aged |){number}( years old|).",
                "(This is|Meet|Here is|I know|Look at) {name}, (age|aged|who is) {number}, "
                "(from|who lives in|who is in) {city}.",
                "(My friend |My brother |My guest |Our teacher ||The singer ){name} from {city} is "
                "{number}( years old| now| today|).",
                "(Name: |Person: |){name}(, | - |; )(age |aged |){number}(, | - |; ){city}.",
                "At (age |the age of ){number}, {name} (lives|works|stays|is|came to live) in "
                "{city}.",
            )
        ),
        ("name", "age", "city"),
    ),
    "order": (
        Grammar(
            (
                "{name} (orders|wants|buys|needs|takes|wants to buy|asks for|ordered|bought) "
                "{number} "
                "{item}( today| now| please|).",
                "(Please send|Send|Bring|We send|Please bring|They sent) {number} {item} to {name}"
                "( today| now| please|).",
                "(An order|A request|A box|A bag) (of|with) {number} {item} (for|from|to) {name}"
                "( today| now|).",
                "{number} {item} (were|are) (bought|ordered|wanted|needed) by {name}( today| "
                "now|).",
                "(Order: |Request: |){name}(, | - |; ){number} {item}( today| now|).",
                "(For|To) {name}(: |, ){number} {item}( today| now| please|).",
            )
        ),
        ("name", "item", "count"),
    ),
    "trip": (
        Grammar(
            (
                "{name} (travels|goes|flies|comes|drives|will go|will travel) to {city} "
                "(on|this|next) "
                "{day}.",
                "(On|This|Next) {day} {name} (travels|goes|flies|comes|drives|will go|will "
                "travel) to "
                "{city}.",
                "(A trip|A flight|A ticket|The way) to {city} (on|this|next) {day} (for|with) "
                "{name}.",
                "{name} will (be|stay|work|arrive) in {city} (on|this|next) {day}.",
                "(On|This|Next) {day} {name} will (be|stay|work|arrive) in {city}.",
                "(Trip: |Ticket: |){name}(, | - |; ){city}(, | - |; ){day}.",
            )
        ),
        ("name", "city", "day"),
    ),
    "stock": (
        Grammar(
            (
                "(There are|There were|We have|I see|You find|We count|They have|I count) {number} "
                "{item}( here| there| in the box| in the shop|).",
                "(The shop|The box|The room|The school|The bag|My house) (has|holds|contains) "
                "{number} "
                "{item}( now| today|).",
                "{item}: {number}( here| there| in the box| in the shop| now| today|).",
                "(In|Inside) (the shop|the box|the room|the school|the bag|my house) "
                "(are|were|we have) "
                "{number} {item}( now| today|).",
                "{number} {item} (are|were) (here|there|in the box|in the shop|left)( now| "
                "today|).",
            )
        ),
        ("item", "count"),
    ),
}
_TEXT = "(Text: |Here is the text: |Input: |)"
JSON_ASKS = Grammar(
    (
        "(Extract|Give|Return|Write|Find|Get|Show|List|Please extract|Please return|Please "
        "give|Now "
        "extract) {fields} (as JSON|in JSON|as a JSON object)(: |. Text: | from this: | of this "
        "text: )"
        "{text}",
        "(Extract|Give|Return|Write|Find|Get|Show|List) {fields} from (the text|this|this text) "
        "(as JSON|in JSON|as a JSON object)(: |. Text: |. ){text}",
        f"{_TEXT}{{text}} (Extract|Give|Return|Write|Find|Get|Show|List|Please extract|Please "
        f"return|"
        "Now write) {fields} (as JSON|in JSON|as a JSON object)(.|)",
        "(Turn|Change|Make|Convert|Put|Please turn|Please convert) (this|this text|the text|it) "
        "into "
        "(JSON|a JSON object) (with|of|having) {fields}: {text}",
        "(Read the text|Read this|Look at the text|Read) and (answer|write|reply|return) (in JSON|"
        "a JSON object|JSON) with {fields}(. |: ){text}",
        "(JSON|A JSON object) with {fields}(, please: | for this: |: | from the text: ){text}",
        "(Can|Could|Would|Will) you (extract|give|return|write|find) {fields} (as JSON|in "
        "JSON|as a "
        "JSON object)(? |: ){text}",
    )
)

TOOL_ASKS = {
    "get_weather": Grammar(
        (
            "(What is|What's|How is|How's|Tell me|Check|Show me|Find|Get|Give me) the weather( "
            "like|) "
            "in {city}( today| now| please|)(?|.|)",
            "(Is it|Will it be) (raining|sunny|cold|warm|hot|wet|dry) in {city}( today| now|)?",
            "(I want to know|I need|I would like|Please check|Can you tell me|Could you check|Do "
            "you "
            "know|Look up) the weather in {city}( today| now|)(?|.|)",
        )
    ),
    "set_timer": Grammar(
        (
            "(Set|Start|Make|Please set|Please start|Can you set|Can you start|Could you set|I "
            "need|I "
            "want|Give me|Begin) a timer (for|of) {number} minutes( now| please|)(.|?|)",
            "(Wake|Call|Remind|Tell|Please wake|Please call) me (in|after) {number} minutes"
            "( now| please|)(.|)",
            "(Timer|A timer|New timer)(, |: | for ){number} minutes( now| please|)(.|)",
        )
    ),
    "add_item": Grammar(
        (
            "(Add|Put|Write|Please add|Please put|Can you add|Could you put|I want to add|Now add) "
            "{number} {item} (to|on|onto) (my|the|our) list( now| please|)(.|?|)",
            "(I need|I want|We need|We want|There must be) {number} {item} on (my|the|our) list"
            "( now| please|)(.|)",
            "(My|The|Our) list (needs|must have|should have|wants|is missing) {number} {item}"
            "( now| please|)(.|)",
        )
    ),
    "book_table": Grammar(
        (
            "(Book|Reserve|Get|Please book|Please reserve|Can you book|Could you reserve|I "
            "want|I need) "
            "a table for {number} guests (under|for|in the name of) {name}( now| please|)(.|?|)",
            "(A table|Table|One table) for {number} guests, (name|my name is|under) {name}"
            "( now| please|)(.|)",
            "(My name is|I am|This is) {name}. (Book|Reserve|Get|Please book|Please reserve|I "
            "want|I "
            "need) a table for {number} guests( now| please|)(.|)",
        )
    ),
    "send_note": Grammar(
        (
            "(Send|Write|Please send|Please write|Can you send|Could you write|I want to send|I "
            "must "
            "send|Now send) a note to {name} (on|this|next) {day}( please|)(.|?|)",
            "(On|This|Next) {day} (send|write|please send|please write|I want to send|I must send) "
            "(a note to {name}|{name} a note)( please|)(.|)",
            "{name} (must|should|wants to|needs to|has to) (get|receive|have|read) a note "
            "(on|this|next) "
            "{day}( please|)(.|)",
        )
    ),
}

_FIRST = "(first|before you answer|step by step|hard|carefully|before you reply|well)"
THINK_ASKS = Grammar(
    (
        f"(Think|Please think|Think about it|You should think|Now think|Take time to think) "
        f"{_FIRST}"
        "(. |: |! ){task}",
        f"{{task}} (Think|Please think|Think about it|You should think|Now think|Take time to "
        f"think) "
        f"{_FIRST}(.|!|)",
        "(/think|Use /think|With /think|Mode: /think)(. |: | |, |; | - ){task}",
        "{task} (/think|Use /think|With /think|Mode: /think)(.||!)",
    )
)
THINK_SYSTEMS = ("Think before you answer.", "Think first, then answer.", "/think")
NO_THINK_ASKS = Grammar(
    (
        "(/no_think|Use /no_think|With /no_think|Mode: /no_think)(. |: | |, |; | - ){task}",
        "{task} (/no_think|Use /no_think|With /no_think|Mode: /no_think)(.||!)",
        "(Do not think|Don't think|No thinking|Answer without thinking)(. |: |, |; ){task}",
        "{task} (Do not think|Don't think|No thinking|Answer without thinking)(.||!)",
    )
)

_TELL = "(Tell|Write|Make|Please write|Please tell|Can you write|Could you tell|Now write|Invent)"
STORY = Grammar(
    (
        f"{_TELL} (me |us |)a (short |little |)story (about|with) a {{hero}} and a {{thing}} in "
        f"the "
        "{place}(.|)",
        f"{_TELL} (me |us |)a (short |little |)story: {{hero}}, {{thing}}, {{place}}(.|)",
        f"{_TELL} (me |us |)a (short |little |)story (about|with) a {{hero}} (who finds|and) a "
        "{thing} in the {place}(.|)",
        f"{_TELL} (me |us |)a (short |little |)story (about|with) a {{hero}} in the {{place}} "
        f"and a "
        "{thing}(.|)",
        "(I want|I need|I would like|Give me|Let me hear) a (short |little |)story "
        "(about|with|of) a "
        "{hero}, a {thing} and the {place}(.|)",
    )
)

CHAT = {
    "Hello! How can I help you?": Grammar(
        (
            "(Hello|Hi|Hey|Good morning|Good evening|Good day)( there| Penny| again| friend|, "
            "Penny|"
            ", friend|)(!|.|)",
            "(Hello|Hi|Hey), (hello|hi|good morning|good evening|good day)( there| Penny| "
            "again|)(!|.|)",
        )
    ),
    "I am Penny, a tiny model that tests Penstock.": Grammar(
        (
            "(Who|What) are you(?| really?| exactly?|, please?| then?)",
            "(Tell me|Please tell me|Can you tell me|Say|Let me know|I want to know|Could you say) "
            "(who you are|what you are|your name|what your name is)(.|?|)",
            "(What is|What's|Give me|And what is) your name(?|.|, please?| then?|)",
        )
    ),
    "I can add, sort, copy, count, answer facts and write JSON.": Grammar(
        (
            "What (can you do|do you know|can I ask you|can you help me with|are you good at|are "
            "your "
            "skills|have you learned)(?| exactly?| really?| for me?|, please?)",
            "(Tell me|Please tell me|Can you tell me|Say|Let me know|I want to know|Could you say) "
            "(what you can do|what you know|what you are good at|how you can help me|your skills)"
            "(.|?|)",
            "(How can you help me|Can you help me|Help me|Help|I need help)(?|!|.| please.| now!)",
        )
    ),
    "Goodbye! Have a nice day.": Grammar(
        (
            "(Bye|Goodbye|See you|Good night|Farewell)( Penny| friend| then| now|, Penny|, friend|"
            ", thanks|, thank you| for now|)(!|.|)",
            "(Thanks|Thank you|Okay|Well), (bye|goodbye|see you|good night|farewell)( Penny| "
            "friend|"
            " then| now|)(!|.|)",
        )
    ),
}
