"""What targets are asked while a draft head is trained for them, and what the result is tried on.

Prompts for training are topics in many forms of question; those that are held out are about topics that occur in none
of them. Answers in another style than the users' make a worse draft, so whoever has prompts of their own adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question.

    Attributes:
        topic: that it is about, by which texts are held out.
        kind: ``novel``: the answer is new text; ``copy``: most of it stands in the question already.
    """

    topic: str
    text: str = field(repr=False)
    kind: str = "novel"


_SUBJECTS: tuple[str, ...] = (
    # Nature
    "rainbows", "earthquakes", "coral reefs", "penguins", "photosynthesis", "the water cycle", "honey badgers",
    "rainforests", "the moon", "black holes", "hurricanes", "migrating birds", "mushrooms", "sharks", "deserts",
    "the human heart", "sleep", "vaccines", "allergies", "dinosaurs", "gravity", "magnets", "lightning", "oak trees",
    # Places and the past
    "ancient Rome", "the Silk Road", "the printing press", "the Great Wall of China", "Vikings", "the Nile",
    "the Industrial Revolution", "medieval castles", "the Olympic Games", "Antarctica", "the Sahara", "New York City",
    "Japan", "Brazil", "the moon landing", "the invention of the telephone", "the Renaissance", "steam engines",
    # Home and daily life
    "baking bread", "growing tomatoes", "doing the laundry", "saving money", "learning to drive", "a vegetable soup",
    "packing for a trip", "cleaning a kitchen", "a birthday party", "moving to a new flat", "riding a bicycle",
    "making coffee", "planning a week of meals", "caring for a puppy", "choosing a mattress", "fixing a dripping tap",
    "pancakes", "a camping weekend", "going to the dentist", "raising chickens", "painting a room",
    # Work and society
    "job interviews", "working from home", "time management", "small businesses", "elections", "public libraries",
    "recycling", "electric cars", "taxes", "teamwork", "customer service", "advertising", "insurance", "immigration",
    "public speaking", "school uniforms", "minimum wages", "renewable energy", "city parks", "volunteering",
    # Technology and numbers
    "binary search", "databases", "encryption", "spreadsheets", "prime numbers", "fractions", "percentages",
    "sorting algorithms", "web browsers", "computer memory", "email", "robots", "3D printing", "satellites",
    "the average of a list", "passwords", "video games", "artificial intelligence", "batteries", "smartphones",
    # Arts, sports, thoughts
    "jazz", "watercolour painting", "haiku", "ballet", "photography", "the guitar", "football", "swimming", "tennis",
    "marathon running", "fairy tales", "science fiction", "friendship", "honesty", "courage", "happiness", "curiosity",
    "patience", "detective stories", "comic books", "cinema", "choirs", "yoga", "mountain climbing",
    # More nature
    "bees and wasps", "elephants", "snow leopards", "octopuses", "frogs", "beetles", "butterflies", "owls", "wolves",
    "whales", "horses", "cats", "ants", "salmon", "bamboo", "roses", "cacti", "fog", "snow", "rivers", "lakes",
    "islands", "minerals", "comets", "Mars", "the seasons", "the ozone layer", "atoms", "sound", "colours", "water",
    "bones", "teeth", "the brain", "blood", "the immune system", "viruses", "evolution", "soil", "meadows", "pollen",
    # More places and the past
    "ancient Egypt", "Greek myths", "the Aztecs", "samurai", "the French Revolution", "the Cold War", "explorers",
    "the Black Death", "railways", "postal services", "pirates", "kings and queens", "money", "writing", "India",
    "Canada", "Iceland", "Mexico", "Australia", "Venice", "London", "Istanbul", "the Himalayas", "the Amazon", "Hawaii",
    # More home and daily life
    "pizza", "rice", "chocolate", "butter", "sandwiches", "breakfast", "salads", "honey", "spices", "sewing",
    "gardening", "composting", "house plants", "dogs", "weddings", "holidays", "neighbours", "grandparents", "babies",
    "teenagers", "homework", "board games", "jigsaw puzzles", "toys", "bedtime stories", "shoes", "umbrellas", "soap",
    "buses", "aeroplanes", "hotels", "suitcases", "headaches", "colds", "stretching", "healthy food", "glasses",
    # More work and society
    "leadership", "budgets", "meetings", "contracts", "start-ups", "newspapers", "theme parks", "hospitals",
    "farmers", "firefighters", "nurses", "engineers", "lawyers", "architects", "human rights", "the constitution",
    "inflation", "trade", "housing", "traffic", "climate change", "nuclear power", "wind power", "plastic", "charities",
    # More technology and numbers
    "the internet", "search engines", "social media", "cloud computing", "machine learning", "neural networks",
    "compilers", "graphs", "hash tables", "recursion", "unit tests", "version control", "probability",
    "triangles", "algebra", "statistics", "units of measurement", "microscopes", "telephones",
    "radio", "television", "lasers", "tunnels", "skyscrapers", "scooters", "drones", "space stations", "cameras",
    # More arts, sports, thoughts
    "the piano", "drums", "folk songs", "hip-hop", "sculpture", "drawing", "theatre", "novels", "biographies", "fables",
    "dragons", "ghosts", "time travel", "basketball", "cricket", "running shoes", "skiing", "surfing", "dance",
    "fashion", "love", "anger", "fear", "memory", "dreams", "luck", "kindness", "justice", "freedom", "wisdom", "hope",
)  # fmt: skip

_FORMS: tuple[str, ...] = (
    "Explain {} to a ten-year-old.",
    "What are three surprising facts about {}?",
    "Write a short story in which {} plays a part.",
    "Give me a numbered list of five tips about {}.",
    "What do most people get wrong about {}?",
    "Write a short poem about {}.",
    "Why does {} matter? Answer in one paragraph.",
    "I have ten minutes to learn something about {}. Where do I begin?",
    "Write a friendly email to a colleague about {}.",
    "Compare {} with something that is similar and say how they differ.",
    "Write a dialogue between a teacher and a student about {}.",
    "Summarise what is known about {} in four sentences.",
    "What questions would you ask an expert on {}?",
    "Describe {} without using the word itself.",
    "What are the advantages and disadvantages of {}?",
    "Write an introduction for an article about {}.",
    "Make a quiz with three questions and answers about {}.",
    "How has {} changed over the last hundred years?",
    "Write a product description that has to do with {}.",
    "Give a step-by-step guide that has to do with {}.",
    "Write a diary entry of somebody who thinks about {} all day.",
    "Define {} and give two examples.",
    "What would the world be like without {}?",
    "Write five hashtags and a short post about {}.",
    "Argue for and against {} in a few sentences each.",
    "Invent a title, a slogan and a first sentence for a book about {}.",
    "Tell me a joke about {} and explain why it is funny.",
    "Which skills help with {}? Use bullet points.",
    "Write a letter to the editor about {}.",
    "What is the most common problem with {}, and how is it solved?",
    "Tell me about {}.",
    "What is the history of {}?",
    "How does one get started with {}?",
    "Name two kinds of {} and say what each is good for.",
    "Why do people like {}?",
    "List the main parts or sides of {} and what each does.",
    "Write a scene of a film that has to do with {}.",
    "Write eight lines of verse on {}.",
    "What should a beginner know about {}?",
    "Describe {} to somebody who has never heard of it.",
    "What is the difference between good and bad advice on {}?",
    "Answer in three sentences: what makes {} interesting?",
)

_FORMS_PER_SUBJECT = 8
"""So that the first hundred thousand positions of a small model are answers to different questions."""

_TASKS: tuple[tuple[str, str], ...] = (
    ("python", "Write a Python function that returns the largest number in a list, and explain it."),
    ("python", "Write a Python function that counts how often each word occurs in a text."),
    ("python", "Write a Python class for a bank account with deposit and withdraw."),
    ("python", "How do I read a CSV file in Python? Show a short example."),
    ("python", "Write a Python program that prints the first twenty Fibonacci numbers."),
    ("python", "What does this print? for i in range(3): print(i * i)"),
    ("python", "Write a Python function that checks whether a word is a palindrome, with three tests."),
    ("javascript", "Write a JavaScript function that reverses a string."),
    ("javascript", "Show how to fetch JSON from a server in JavaScript."),
    ("javascript", "Write an HTML page with a heading, a paragraph and a button that says hello."),
    ("sql", "Write an SQL query that finds the five customers who have spent the most."),
    ("sql", "Explain the difference between an inner join and a left join with an example."),
    ("shell", "Which shell command finds all files larger than 100 MB? Explain its parts."),
    ("shell", "Write a shell script that renames all .txt files in a folder to .md."),
    ("json", "Give me a JSON object that describes a person with a name, an age and two hobbies."),
    ("json", "Turn this into JSON: Anna is 31 and lives in Oslo, Ben is 28 and lives in Rome."),
    ("arithmetic", "A shirt costs 40 dollars and is reduced by 15 percent. What does it cost now? Show your steps."),
    ("arithmetic", "A train travels 180 km in 2.5 hours. How fast is it on average?"),
    ("arithmetic", "If 3 apples cost 2.40, what do 7 apples cost? Explain."),
    ("arithmetic", "Solve 2x + 6 = 20 and explain each step."),
    ("arithmetic", "What is the area of a circle with a radius of 5 cm?"),
    ("arithmetic", "Convert 68 degrees Fahrenheit to Celsius and show the formula."),
    ("arithmetic", "I was born in 1987. How old am I in 2024? Think step by step."),
    ("arithmetic", "There are 12 boys and 18 girls in a class. What share of the class are girls?"),
    ("logic", "All cats are animals. Some animals are black. Are all cats black? Explain."),
    ("logic", "Tom is taller than Sam, and Sam is taller than Kim. Who is the shortest?"),
    ("logic", "Find the odd one out and say why: apple, banana, carrot, cherry."),
    ("translation", "Translate into French: Where is the nearest train station?"),
    ("translation", "Translate into Spanish: I would like a table for two, please."),
    ("translation", "Translate into German: The weather is nice today, so we are going for a walk."),
    ("translation", "How do I say thank you in five languages?"),
    ("grammar", "When do I use 'who' and when 'whom'? Give examples."),
    ("grammar", "Explain the difference between 'affect' and 'effect'."),
    ("grammar", "Give me ten synonyms of 'happy', each in a sentence."),
    ("grammar", "What is a metaphor? Give three examples."),
    ("letters", "Write a polite email that asks a landlord to repair the heating."),
    ("letters", "Write a short thank-you note for a wedding present."),
    ("letters", "Write a cover letter for a job as a waiter."),
    ("letters", "Write an apology to a friend whose birthday I forgot."),
    ("letters", "Write a message that invites neighbours to a street party on Saturday."),
    ("letters", "Decline a meeting politely and propose another day."),
    ("names", "Suggest eight names for a small bakery, and say what each means."),
    ("names", "Suggest five names for a grey cat."),
    ("names", "Invent a superhero with a name, a power and a weakness."),
    ("advice", "My friend does not answer my messages any more. What should I do?"),
    ("advice", "I cannot concentrate when I study. Give me a plan for the next week."),
    ("advice", "How can I get up earlier without being tired?"),
    ("advice", "I am nervous before exams. What helps?"),
    ("advice", "Should I rent or buy a flat? Ask me what you need to know."),
    ("advice", "How do I start running if I have never done any sport?"),
    ("planning", "Plan three days in Paris for a family with two children."),
    ("planning", "Make a schedule for a one-hour workout at home."),
    ("planning", "Make a shopping list for a dinner with six guests."),
    ("planning", "Plan a lesson of 45 minutes about the solar system."),
    ("table", "Make a table of the planets with their size and their distance from the sun."),
    ("table", "Make a table that compares tea and coffee in four respects."),
    ("classification", "Is this review positive or negative? 'The room was clean, but nobody was at the desk.'"),
    ("classification", "Sort into fruits and vegetables: pear, leek, plum, cabbage, grape, spinach."),
    ("classification", "Which of these are verbs: run, table, think, green, write?"),
    ("role", "You are a travel guide. Greet a group of visitors in Lisbon."),
    ("role", "You are a doctor in a small town. Explain to a patient why sleep is important."),
    ("role", "You are a pirate. Describe your ship."),
    ("role", "Pretend to be a shop assistant and help me to choose a pair of shoes."),
    ("editing", "Make this sentence more formal: Hey, can you send me the stuff by tomorrow?"),
    ("editing", "Correct the mistakes: She go to school every days and like her teachers."),
    ("editing", "Shorten this: Due to the fact that it was raining, we came to the decision to stay at home."),
    ("editing", "Rewrite in the past tense: I walk to the market, buy some bread and meet an old friend."),
    ("editing", "Repeat this sentence three times, each time with another ending: When I opened the door,"),
    ("editing", "Put these words into alphabetical order: river, apple, stone, cloud, bridge, lamp."),
    ("summary", "Summarise in one sentence: The town built a new bridge last year. It is wider than the old one, and "
     "cyclists have their own lane. Most people like it, but some say that it was too expensive."),
    ("summary", "What is the main point? 'Plants on a desk do not clean the air by much, but people who have some say "
     "that they feel calmer and take fewer breaks.'"),
    ("summary", "Answer from the text. Text: The shop opens at nine and closes at six, on Sundays it is closed. "
     "Question: Can I go there on Sunday at ten?"),
    ("summary", "List the facts in this text: Maria moved to Madrid in 2015, works in a hospital and has two sons."),
)  # fmt: skip

_HELD_OUT_NOVEL: tuple[tuple[str, str], ...] = (
    ("beekeeping", "What does a beekeeper do in each of the four seasons?"),
    ("lighthouses", "Tell me how lighthouses worked before there was electricity."),
    ("glaciers", "How does a glacier shape a valley? Explain it simply."),
    ("origami", "Why is origami used by engineers? Give two examples."),
    ("typography", "What is the difference between a serif and a sans-serif typeface?"),
    ("kimchi", "Describe how kimchi is made and why it keeps for so long."),
    ("falconry", "Write a short scene in which a girl trains her first falcon."),
    ("clockmaking", "What are the main parts of a mechanical clock?"),
    ("pottery", "List the steps from a lump of clay to a glazed bowl."),
    ("submarines", "How can a submarine dive and rise again?"),
    ("tea ceremony", "Describe a tea ceremony to somebody who has never seen one."),
    ("puppets", "Write the opening lines of a puppet play about two greedy kings."),
    ("caves", "What should you take along when you explore a cave?"),
    ("perfume", "How is a perfume composed? Use the terms top note and base note."),
    ("knots", "Which three knots should every sailor know, and what is each for?"),
    ("tides", "Why are there two high tides a day?"),
    ("graffiti", "Is graffiti art or damage? Give both views in a few sentences."),
    ("accordions", "How does an accordion make its sound?"),
    ("chess", "Explain to a beginner how the knight moves and why it is useful."),
    ("lichens", "What is a lichen, and where can I find one?"),
    ("windmills", "Write a poem of eight lines about an old windmill."),
    ("cartography", "Why is every flat map of the earth wrong in some way?"),
    ("auctions", "How does an auction work? Name two kinds."),
    ("fireworks", "Where do the colours of fireworks come from?"),
    ("stammering", "How should I talk with somebody who stammers?"),
    ("roller coasters", "Which forces act on you in a roller coaster?"),
    ("stained glass", "Describe how a stained-glass window is made."),
    ("regular expressions", "Write a regular expression that matches a date such as 2021-03-09, and explain it."),
    ("matrix transposition", "Write a Python function that transposes a matrix given as a list of lists."),
    ("compound interest", "I put 500 dollars away at 4 percent a year. How much is it after three years?"),
    ("mosaics", "Give me five ideas for a mosaic in a school yard."),
    ("hitchhiking", "Write a diary entry of a hitchhiker on a rainy day."),
    ("braille", "How does braille work, and who invented it?"),
    ("avalanches", "What should skiers know about avalanches?"),
    ("sundials", "How can I build a sundial in a garden?"),
    ("opera", "Explain the plot of an invented opera in five sentences."),
)  # fmt: skip

_CANAL = (
    "The canal was dug in 1824 to bring coal to the mill. It is nine kilometres long and has four locks. "
    "Horses pulled the boats until 1911, when the first motor boat arrived. Today the canal is used by walkers and "
    "anglers, and every June there is a race of home-made rafts."
)
_COOPERATIVE = (
    "Our cooperative runs a repair shop in the old fire station. On Tuesdays we mend lamps and radios, on Thursdays "
    "clothes and bags. Nobody has to pay, but most people leave something in the box. Last year we repaired 1,312 "
    "things, and 274 could not be saved."
)
_CODE = (
    "def total_price(items, discount):\n"
    "    result = 0\n"
    "    for item in items:\n"
    "        result = result + item.price * item.count\n"
    "    if discount:\n"
    "        result = result * 0.9\n"
    "    return result\n"
)
_CONFIG = "host: example.org\nport: 8080\nworkers: 4\nlog_level: info\ntimeout_s: 30\ncache: true\nregion: north\n"
_LETTER = (
    "Dear Ms Okafor, thank you for lending us your telescope. The children saw the rings of Saturn for the first time, "
    "and two of them now want to become astronomers. We will bring it back on Friday afternoon. Kind regards, Jonas"
)
_TABLE = "name,city,score\nAda,Turin,71\nBo,Malmo,64\nCleo,Porto,88\nDan,Cork,59\nEsi,Accra,93\nFay,Leeds,77\n"

_HELD_OUT_COPY: tuple[tuple[str, str], ...] = (
    ("canal", f"Repeat the following text word for word:\n\n{_CANAL}"),
    ("canal", f"Copy this text and put every sentence on its own line:\n\n{_CANAL}"),
    ("canal", f"Repeat this text, but write 1842 instead of 1824:\n\n{_CANAL}"),
    ("canal", f"Quote the sentences of this text that contain a year:\n\n{_CANAL}"),
    ("repair shop", f"Repeat the following text exactly:\n\n{_COOPERATIVE}"),
    ("repair shop", f"Write this text again with 'they' instead of 'we':\n\n{_COOPERATIVE}"),
    ("repair shop", f"Quote the last two sentences of this text:\n\n{_COOPERATIVE}"),
    ("repair shop", f"Repeat this text and add one sentence at its end:\n\n{_COOPERATIVE}"),
    ("price function", f"Rename the variable result to total and print the whole function:\n\n{_CODE}"),
    ("price function", f"Print this code again without any change:\n\n{_CODE}"),
    ("price function", f"Add a docstring to this function and print all of it:\n\n{_CODE}"),
    ("settings file", f"Print this file again with the port set to 9090:\n\n{_CONFIG}"),
    ("settings file", f"Copy this file exactly:\n\n{_CONFIG}"),
    ("telescope letter", f"Copy this letter, but sign it with Miriam:\n\n{_LETTER}"),
    ("telescope letter", f"Repeat this letter word for word:\n\n{_LETTER}"),
    ("score table", f"Print this table again, and change the score of Dan to 95:\n\n{_TABLE}"),
    ("score table", f"Copy the following lines exactly as they are:\n\n{_TABLE}"),
    ("score table", f"Repeat this table twice:\n\n{_TABLE}"),
)  # fmt: skip


def training_prompts() -> list[Prompt]:
    """All prompts for training, about 2,600, always in the same order: neighbours have different topics and forms."""
    asked = [
        Prompt(subject, _FORMS[(place * 7 + part * 11) % len(_FORMS)].format(subject))
        for part in range(_FORMS_PER_SUBJECT)
        for place, subject in enumerate(_SUBJECTS)
    ]
    return asked + [Prompt(topic, text) for topic, text in _TASKS]


def held_out_prompts() -> list[Prompt]:
    """Prompts about topics that no prompt for training has: new text first, then what is mostly copied."""
    return [Prompt(topic, text) for topic, text in _HELD_OUT_NOVEL] + [
        Prompt(topic, text, "copy") for topic, text in _HELD_OUT_COPY
    ]


def split_by_topic(prompts: Sequence[Prompt], *, one_in: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of most topics, and those of every so many-th one, for measuring while training."""
    topics = list(dict.fromkeys(prompt.topic for prompt in prompts))
    apart = set(topics[one_in - 1 :: one_in])
    return [p for p in prompts if p.topic not in apart], [p for p in prompts if p.topic in apart]
