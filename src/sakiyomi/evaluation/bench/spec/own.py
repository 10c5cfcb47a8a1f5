"""Questions that travel with the package, in the categories of SPEED-Bench (arXiv 2604.09557); written for this."""

from __future__ import annotations

__all__ = ["OWN"]

BAKERY = (
    "The bakery at the corner of Mill Street opens at six. Its owner, Mrs. Alder, bakes twelve kinds of bread, and on "
    "Fridays a thirteenth with walnuts and honey. In March the oven broke, and for nine days she baked in the kitchen "
    "of the school across the street. The children helped her to carry the loaves. When the oven was repaired she "
    "gave every child a small bread in the form of a fish."
)
BRIDGE = (
    "The wooden bridge over the Lenn was built in 1841 by two brothers, who asked one copper coin of everybody who "
    "crossed it. A flood carried its middle part away in 1902. For eleven years people crossed by boat, until the town "
    "paid for a bridge of stone. The old toll house still stands; today it is a library with four thousand books, and "
    "its door is painted blue."
)
FOX = (
    "A fox lived under the roots of an old oak. In autumn he found a lantern in the grass, and he carried it home "
    "between his teeth. At night the lantern gave a warm light, and the other animals came to look at it. The owl read "
    "aloud, the mice danced, and the hedgehog slept. When the snow came the fox hung the lantern at the edge of the "
    "wood, so that nobody would lose the way."
)

OWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "coding": (
        (
            "Write a Python function that counts how often each word stands in a text.",
            "Change it so that capital letters make no difference, and show the whole function again.",
        ),
        (
            "def area(width, height):\n    return width * height\n\nRename width to length and height to depth "
            "throughout, and add a function that computes the volume.",
        ),
        ("Write a function in Python that says whether a number is prime, with three tests.",),
    ),
    "humanities": (
        ("Why did people begin to live in towns? Name three reasons and explain each in two sentences.",),
        ("Compare a fairy tale with a myth.", "Give one example of each and tell it in three sentences."),
        ("What did the printing press change in the lives of people who could not read?",),
    ),
    "math": (
        ("A farmer has 24 apples and gives a third of them away. How many are left? Explain each step.",),
        (
            "A train leaves at 9:40 and arrives at 11:25. How long does it travel?",
            "It is then ten minutes late. When does it arrive?",
        ),
        ("Add 17, 28 and 55, then divide by 4. Show the steps.",),
    ),
    "multilingual": (
        ("Translate into German: The little boat went down the river, and the children waved.",),
        ("次の文を英語に訳してください。小さな狐が古い樫の木の下に住んでいました。",),
        ("Raconte en quelques phrases l'histoire d'un chat qui voulait voir la mer.",),
    ),
    "qa": (
        ("Why is the sky blue during the day and red in the evening?",),
        ("What do bees do in winter?",),
        ("Who looks after a lighthouse, and what does this person do every day?",),
    ),
    "rag": (
        (f"{BRIDGE}\n\nUse only the text above. When was the bridge damaged, and how did people cross afterwards?",),
        (f"{BAKERY}\n\nUse only the text above. Where did Mrs. Alder bake while her oven was broken, and how long?",),
        (f"{FOX}\n\n{BAKERY}\n\nUse only the texts above. Who slept, and what did the children carry?",),
    ),
    "reasoning": (
        ("Tom is older than Mia. Mia is older than Ben. Who is the youngest? Explain how you know it.",),
        (
            "A box is in a bag, and the bag is in a cupboard. The cupboard is carried to another room. Where is the "
            "box now?",
            "Now somebody takes the bag out. Where is the box?",
        ),
        ("All the cups on the table are red. This cup is blue. What follows, and why?",),
    ),
    "roleplay": (
        ("You are an old sailor. Tell me how you lost your hat.", "And what did the captain say to that?"),
        ("You are a bear who does not want to sleep in winter. Speak to your mother.",),
        ("You are a robot in a garden. Describe your morning.", "A bird sits down on your arm. What do you do?"),
    ),
    "stem": (
        ("Explain to a child why ice swims on water.",),
        ("How does a seed know which way is up?",),
        ("What happens in a wire when a lamp is switched on?", "And when the wire is cut?"),
    ),
    "summarization": (
        (f"{BAKERY}\n\nSummarize this text in two sentences.",),
        (f"{BRIDGE}\n\nSummarize this text in two sentences.",),
        (f"{FOX}\n\nTell this again in a shorter form, with its own words where you can.",),
    ),
    "writing": (
        ("Write a story that begins: Once upon a time, there was a little girl who found a shiny stone.",),
        ("Write a story that begins: One day, a boy named Tom went to the park with his dog.",),
        (
            "Write a letter to a friend about a day by the sea.",
            "Write it once more, and begin every sentence with the word we.",
        ),
    ),
}
"""Turns of each question, by category."""
