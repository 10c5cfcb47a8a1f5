"""Many beginnings of stories from a few sentences, written for this package."""

from __future__ import annotations

import math

__all__ = ["beginnings"]

WHO = (
    "Once upon a time, a fox and a hen lived in a house by the river.",
    "Mia and her brother Leo had a small tent in the garden.",
    "There were once two bears who shared one warm coat.",
    "Grandpa and Rosa went to the market every Saturday.",
    "A tailor and his cat lived above a bakery.",
    "Ben and his friend Omar liked to build boats out of wood.",
    "Two little frogs sat on a leaf in the middle of the lake.",
    "In a tall tower lived a queen and her old owl.",
    "Nora and her dad were on a long train to the sea.",
    "The mouse and the elephant were best friends.",
    "Three ducks wanted to see the big city.",
    "A boy named Sam and a girl named Ada found a map in the attic.",
    "The farmer and his wife had a very lazy donkey.",
    "Twins called Pip and Pola lived on a ship.",
    "It was the first day of school for Tim and Lea.",
    "High in the mountains a shepherd and his dog watched the sheep.",
    "A robot and a rabbit worked together in a toy shop.",
    "Emma and her aunt planted seeds behind the barn.",
    "A dragon and a knight played cards every evening.",
)
WHAT = (
    "One morning they found a letter under the door.",
    "It had rained all night, and the path was full of mud.",
    "They were very hungry, but there was only one piece of bread.",
    "That day a strange noise came from the roof.",
    "They wanted to make a cake, but they had no eggs.",
    "Suddenly a balloon landed right in front of them.",
    "They had promised to be home before dark.",
    "A big box stood on the table, and nobody knew who had brought it.",
    "Then the wind took their hat and blew it over the hill.",
    "They saw a tiny bird that could not fly.",
    "It was so cold that the water turned to ice.",
    "They heard that a circus had come to town.",
    "In the afternoon they lost the only key they had.",
)
THEN = (
    "They looked at each other and",
    '"What shall we do now?" asked',
    "After a while they decided to",
    "But it was not easy, because",
    "They ran as fast as they could until",
    '"I have an idea," said',
    "Nobody had ever seen anything like it, so",
    "At first they were afraid, but then",
    "An old man came along and told them",
    "When they opened their eyes,",
    "They sat down under a tree and",
)


def beginnings(count: int) -> list[str]:
    """Prompts of about 30 words, each another one. Neighbours share no sentence, and of the even and the odd ones both
    have all: the numbers of sentences are odd, and have no common divisor.

    Args:
        count: how many are wanted; there are 2717.
    """
    most = math.lcm(len(WHO), len(WHAT), len(THEN))
    return [f"{WHO[i % len(WHO)]} {WHAT[i % len(WHAT)]} {THEN[i % len(THEN)]}" for i in range(min(count, most))]
