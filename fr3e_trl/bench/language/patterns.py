"""Sentences of the families in English. A pattern is a scene, with its own words for all that can happen in it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """
    A scene and its sentences, with `{who}` for a name and `{n}`, `{k}` for numbers.

    Args:
        things (`str`):
            What is counted.
        start (`str`):
            How many there are at first.
        more (`str`), fewer (`str`):
            Some come, or go.
        groups (`str`):
            Some groups of as many each come.
        twice (`str`):
            There are twice as many.
        question (`str`):
            Asks how many there are in the end.
    """

    things: str
    start: str
    more: str
    fewer: str
    groups: str
    twice: str
    question: str


PATTERNS = (
    Pattern(
        "apples",
        "{who} has {n} apples in a basket.",
        "{who} picks {n} more.",
        "Then {n} of them are eaten.",
        "A neighbour brings {n} bags with {k} apples in each.",
        "By evening {who} has doubled what was in the basket.",
        "How many apples are in the basket now?",
    ),
    Pattern(
        "books",
        "A shelf in {who}'s library holds {n} books.",
        "Readers give back {n} books.",
        "Someone borrows {n} books.",
        "A van delivers {n} boxes of {k} books.",
        "A school's gift makes twice as many books.",
        "How many books does the shelf hold in the end?",
    ),
    Pattern(
        "passengers",
        "{who} drives a bus with {n} passengers.",
        "At a stop {n} people get on.",
        "At the market {n} people get off.",
        "At the station {n} families of {k} get on.",
        "At the stadium the number of passengers doubles.",
        "With how many passengers does the bus drive on?",
    ),
    Pattern(
        "eggs",
        "On {who}'s farm there are {n} eggs in the kitchen.",
        "The hens lay {n} more eggs.",
        "A cake takes {n} eggs.",
        "{n} hens lay {k} eggs each.",
        "A second farm sends as many eggs as there are already.",
        "How many eggs are in the kitchen after that?",
    ),
    Pattern(
        "coins",
        "{who} saves money and has {n} coins.",
        "For sweeping the yard {who} earns {n} coins.",
        "A toy costs {who} {n} coins.",
        "On each of {n} days {who} earns {k} coins.",
        "Grandmother doubles {who}'s coins.",
        "How many coins has {who} saved?",
    ),
    Pattern(
        "cookies",
        "{who} bakes {n} cookies.",
        "A friend adds {n} cookies.",
        "The children take {n} cookies.",
        "Then {n} trays of {k} cookies come out of the oven.",
        "Another batch doubles the number of cookies.",
        "How many cookies are left?",
    ),
    Pattern(
        "fish",
        "In {who}'s pond swim {n} fish.",
        "{n} young fish hatch.",
        "A heron catches {n} fish.",
        "{who} puts in {n} buckets with {k} fish each.",
        "In spring the fish become twice as many.",
        "How many fish swim in the pond?",
    ),
    Pattern(
        "stamps",
        "{who}'s album has {n} stamps.",
        "An uncle sends {n} stamps.",
        "{who} swaps away {n} stamps.",
        "{who} fills {n} pages with {k} new stamps each.",
        "At a fair {who} doubles the collection.",
        "How many stamps does the album have now?",
    ),
    Pattern(
        "chairs",
        "For a concert {who} sets up {n} chairs.",
        "Helpers carry in {n} more chairs.",
        "{n} broken chairs are taken away.",
        "They add {n} rows of {k} chairs.",
        "Since so many guests come, the chairs are doubled.",
        "How many chairs stand in the hall?",
    ),
    Pattern(
        "points",
        "{who} starts a game with {n} points.",
        "A lucky throw brings {n} points.",
        "A mistake costs {n} points.",
        "{who} wins {n} rounds worth {k} points each.",
        "A joker doubles the score.",
        "What is {who}'s score in points?",
    ),
    Pattern(
        "flowers",
        "{who} plants {n} flowers in the garden.",
        "A week later {who} plants {n} more.",
        "Rabbits eat {n} flowers.",
        "{who} plants {n} beds of {k} flowers.",
        "In May there are twice as many flowers as before.",
        "How many flowers grow in the garden?",
    ),
    Pattern(
        "bottles",
        "A kiosk that {who} runs has {n} bottles of juice.",
        "A truck leaves {n} bottles.",
        "By noon {n} bottles are sold.",
        "{who} orders {n} crates of {k} bottles.",
        "For a feast {who} doubles the stock of bottles.",
        "How many bottles does the kiosk have at night?",
    ),
    # Held out
    Pattern(
        "sheep",
        "A shepherd called {who} watches {n} sheep.",
        "{n} lambs are born.",
        "{n} sheep are led to another valley.",
        "{n} villages hand over {k} sheep each.",
        "After a good year the flock is twice as large.",
        "How large is the flock now?",
    ),
    Pattern(
        "tickets",
        "At the fair {who} holds {n} tickets.",
        "{who} finds {n} tickets on the ground.",
        "A ride on the big wheel takes {n} tickets.",
        "{who} buys {n} strips of {k} tickets.",
        "The clown doubles {who}'s tickets.",
        "How many tickets does {who} hold?",
    ),
    Pattern(
        "pages",
        "{who}'s report has {n} pages.",
        "{who} writes {n} further pages.",
        "The editor crosses out {n} pages.",
        "{n} colleagues add {k} pages each.",
        "A translation makes the report twice as long.",
        "How many pages long is the report?",
    ),
    Pattern(
        "bricks",
        "Beside a wall {who} stacks {n} bricks.",
        "{n} bricks come from the old barn.",
        "The mason lays {n} of the bricks.",
        "{n} carts unload {k} bricks each.",
        "A late delivery doubles the stack.",
        "How many bricks are in the stack?",
    ),
)
NUM_HELDOUT = 4  # the last ones

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
