"""Sentences of the families in English. A pattern is a scene, with sentences for what can happen in it."""

from collections.abc import Mapping
from dataclasses import dataclass

# What can happen, with `{who}` for a name and `{n}`, `{k}` for numbers
EVENTS = {
    "more": (
        "{who} gets {n} more {things}.",
        "A friend gives {who} {n} {things}.",
        "Then {n} new {things} arrive.",
        "{who} buys {n} {things}.",
        "Somebody brings {n} more {things}.",
        "{n} other {things} are put there too.",
    ),
    "fewer": (
        "{who} loses {n} {things}.",
        "Then {n} {things} are taken away.",
        "{who} gives {n} {things} to a friend.",
        "A thief steals {n} of the {things}.",
        "{n} {things} are sold.",
        "{who} uses up {n} of the {things}.",
    ),
    "groups": (
        "{who} buys {n} boxes with {k} {things} in each.",
        "{n} friends bring {k} {things} each.",
        "On each of {n} days {who} gets {k} {things}.",
        "Then come {n} bags of {k} {things}.",
        "{who} adds {n} rows of {k} {things}.",
        "{n} helpers carry in {k} {things} each.",
    ),
    "twice": (
        "{who} doubles the number of {things}.",
        "Then there are twice as many {things}.",
        "By evening the {things} have become twice as many.",
        "{who} gets as many {things} as there are already.",
        "A gift doubles the {things}.",
        "Now there are two times as many {things}.",
    ),
}
HELDOUT_EVENTS = {
    "more": ("{who} finds {n} {things} and keeps them.", "Later {n} further {things} come in."),
    "fewer": ("{n} of the {things} disappear.", "{who} sends {n} {things} away."),
    "groups": ("{n} neighbours hand over {k} {things} each.", "{who} unpacks {n} bundles of {k} {things}."),
    "twice": ("After a week the number of {things} has doubled.", "Soon {who} sees twice the number of {things}."),
}


@dataclass(frozen=True, eq=False)
class Pattern:
    """
    A scene, with `{who}` for a name and `{n}` for a number.

    Args:
        things (`str`):
            What is counted.
        start (`str`):
            How many there are at first.
        question (`str`):
            Asks how many there are in the end.
        events (`Mapping[str, tuple[str, ...]]`):
            How it is told that some come (`more`), that some go (`fewer`), that some groups of as many each come
            (`groups`), and that there are twice as many (`twice`).
    """

    things: str
    start: str
    question: str
    events: Mapping[str, tuple[str, ...]]


PATTERNS = tuple(
    Pattern(*scene, EVENTS)
    for scene in (
        ("apples", "{who} has {n} apples in a basket.", "How many apples are in the basket now?"),
        ("books", "A shelf in {who}'s library holds {n} books.", "How many books are there in the end?"),
        ("eggs", "On {who}'s farm there are {n} eggs in the kitchen.", "How many eggs are there after that?"),
        ("coins", "{who} saves money and has {n} coins.", "How many coins has {who} saved?"),
        ("cookies", "{who} bakes {n} cookies.", "How many cookies are there now?"),
        ("lamps", "In {who}'s shop stand {n} lamps.", "How many lamps are in the shop?"),
        ("stamps", "{who}'s album has {n} stamps.", "How many stamps does the album have now?"),
        ("chairs", "For a concert {who} sets up {n} chairs.", "How many chairs stand in the hall?"),
        ("marbles", "{who} starts a game with {n} marbles.", "With how many marbles does the game end?"),
        ("flowers", "{who} puts {n} flowers into a big vase.", "How many flowers are in the vase?"),
        ("bottles", "A kiosk that {who} runs has {n} bottles of juice.", "How many bottles does it have at night?"),
        ("candles", "On the table {who} counts {n} candles.", "How many candles are on the table now?"),
    )
)
HELDOUT_PATTERNS = tuple(
    Pattern(*scene, HELDOUT_EVENTS)
    for scene in (
        ("shells", "At the beach {who} has {n} shells in a bucket.", "What is the number of shells now?"),
        ("tickets", "At the fair {who} holds {n} tickets.", "How many tickets does {who} hold?"),
        ("bricks", "Beside a wall {who} stacks {n} bricks.", "How many bricks are in the stack?"),
        ("pencils", "{who}'s drawer is full of {n} pencils.", "How many pencils does the drawer have in the end?"),
    )
)

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Lena", "Tom")

# How the demonstrator says what an event does: `{a}` is what there was, `{b}` what there is then
STEPS = {
    "more": (
        "With {n} more there are {a} + {n} = {b} {things}.",
        "Adding {n} gives {a} + {n} = {b}.",
        "Then {n} come on top, so {a} + {n} = {b}.",
    ),
    "fewer": (
        "Without those {n} there are {a} - {n} = {b} {things}.",
        "Taking away {n} leaves {a} - {n} = {b}.",
        "Now {n} are gone, so {a} - {n} = {b}.",
    ),
    "groups": (
        "We add {n} * {k} = {p} and get {a} + {p} = {b}.",
        "These are {n} * {k} = {p} {things}, and {a} + {p} = {b}.",
        "The new ones are {n} * {k} = {p}, so {a} + {p} = {b}.",
    ),
    "twice": (
        "Twice as many is {a} + {a} = {b}.",
        "Doubling gives {a} + {a} = {b} {things}.",
        "Now there are {a} + {a} = {b} {things}.",
    ),
}
OPENINGS = (
    "At first there are {a} {things}.",
    "We begin with {a} {things}.",
    "There are {a} {things} to start with.",
)
ENDINGS = (
    "The answer is \\boxed{{{b}}}.",
    "So the answer is \\boxed{{{b}}}.",
    "In the end it is \\boxed{{{b}}}.",
)

# What does not matter: in long stories, between the events and between the steps of a solution
ASIDES = (
    "The sun is shining over the old town.",
    "A dog barks somewhere behind the house.",
    "Nobody knows why the clock has stopped.",
    "It is a quiet afternoon, and the windows are open.",
    "Somebody plays the piano in the next room.",
    "The smell of fresh bread is in the air.",
    "A cold wind blows from the north.",
    "Two old men are talking about the weather.",
    "The radio says that it will rain tomorrow.",
    "Everyone is in a good mood today.",
    "A cat sleeps under the table.",
    "It has been a long and busy day.",
)
REMARKS = (
    "Now let us read on and see what happens next.",
    "This part of the story is easy to overlook.",
    "What the weather is like does not change the number.",
    "The next sentence tells us something that we need.",
    "We can ignore the rest of what is said here.",
    "It is good to write every step down with care.",
    "Let me think about the next part of the story.",
    "Nothing else in this sentence changes the count.",
)


@dataclass(frozen=True)
class Stock:
    """
    A place with four kinds of things, and its sentences. `{list}` stands for `3 pens, 8 rulers, …`.

    Args:
        things (`tuple[str, ...]`):
            The kinds.
        start (`str`), more (`str`), fewer (`str`):
            What there is at first, and that some of a kind, `{things}`, come or go.
    """

    things: tuple[str, str, str, str]
    start: str
    more: str
    fewer: str


STOCKS = (
    Stock(
        ("pens", "rulers", "folders", "erasers"),
        "{who}'s shop for school things has {list}.",
        "A parcel brings {n} {things}.",
        "A class buys {n} {things}.",
    ),
    Stock(
        ("rolls", "pretzels", "cakes", "tarts"),
        "In the morning {who}'s bakery has {list}.",
        "The oven gives {n} more {things}.",
        "A customer asks for {n} {things}.",
    ),
    Stock(
        ("goats", "ducks", "geese", "hens"),
        "On {who}'s farm live {list}.",
        "{n} {things} are born.",
        "{n} {things} are sold at the market.",
    ),
    Stock(
        ("roses", "tulips", "lilies", "daisies"),
        "{who} sells flowers and has {list}.",
        "The gardener cuts {n} more {things}.",
        "For a wedding {n} {things} are taken.",
    ),
    Stock(
        ("hammers", "saws", "drills", "pliers"),
        "In {who}'s workshop hang {list}.",
        "A friend returns {n} {things}.",
        "{who} lends {n} {things} to a neighbour.",
    ),
    Stock(
        ("shirts", "coats", "hats", "scarves"),
        "{who} keeps a shop for clothes with {list}.",
        "{who} sews {n} new {things}.",
        "Tourists carry off {n} {things}.",
    ),
    Stock(
        ("cups", "plates", "bowls", "spoons"),
        "The kitchen of {who}'s inn has {list}.",
        "From the cellar come {n} {things}.",
        "The guests lose {n} {things}.",
    ),
    Stock(
        ("cars", "trains", "dolls", "kites"),
        "{who} has a box of toys with {list}.",
        "For the birthday there are {n} {things} more.",
        "{n} {things} break and are thrown away.",
    ),
    Stock(
        ("apples", "pears", "plums", "lemons"),
        "At {who}'s fruit stand lie {list}.",
        "From the orchard come {n} {things}.",
        "A cook chooses {n} {things}.",
    ),
    Stock(
        ("novels", "comics", "atlases", "diaries"),
        "{who} sorts a case of books: {list}.",
        "In the attic {who} finds {n} {things}.",
        "{n} {things} go to a cousin.",
    ),
    Stock(
        ("balls", "nets", "ropes", "hoops"),
        "In the gym {who} counts {list}.",
        "The club buys {n} {things}.",
        "A team borrows {n} {things}.",
    ),
    Stock(
        ("lamps", "chairs", "desks", "mirrors"),
        "{who} trades in furniture and has {list}.",
        "At an auction {who} gets {n} {things}.",
        "A hotel orders {n} {things}.",
    ),
    # Held out
    Stock(
        ("stamps", "coins", "shells", "marbles"),
        "{who} collects many things: {list}.",
        "At the seaside {who} adds {n} {things}.",
        "{who} gives a sister {n} {things}.",
    ),
    Stock(
        ("trout", "carp", "eels", "crabs"),
        "A fisher called {who} has {list} in the boat.",
        "The net holds {n} {things} besides.",
        "{n} {things} slip back into the sea.",
    ),
    Stock(
        ("tents", "maps", "torches", "stoves"),
        "For a hike {who} packs {list}.",
        "A second group brings along {n} {things}.",
        "They leave {n} {things} behind.",
    ),
)
NUM_STOCKS_HELDOUT = 3  # the last ones

# How the demonstrator begins the line of a kind, which ends with how many there are
LINES = (
    "{things}: {sum} = {b}",
    "{things}: from {a} we come by {sum} to {b}",
    "{things}: counting {sum} gives {b}",
    "{things}: {sum}, and that is {b}",
)
