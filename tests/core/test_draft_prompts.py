"""The prompts that draft heads are trained with and tried on."""

from __future__ import annotations

import re
from collections import Counter

from fusion_node.engine.draft_prompts import held_out_prompts, split_by_topic, training_prompts


def test_there_are_enough_prompts_and_none_twice() -> None:
    prompts = training_prompts()
    assert len(prompts) >= 500
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.topic for prompt in prompts}) >= 120
    assert all(10 <= len(prompt.text) <= 400 and "{" not in prompt.text for prompt in prompts)
    # No form of a question is most of them.
    beginnings = Counter(" ".join(prompt.text.split()[:4]) for prompt in prompts)
    assert beginnings.most_common(1)[0][1] < len(prompts) / 10


def test_held_out_prompts_are_about_topics_that_no_training_prompt_has() -> None:
    held_out = held_out_prompts()
    kinds = Counter(prompt.kind for prompt in held_out)
    assert kinds["novel"] >= 32
    assert kinds["copy"] >= 16
    training = " ".join(prompt.text.lower() for prompt in training_prompts())
    for prompt in held_out:
        assert not re.search(rf"\b{re.escape(prompt.topic.lower())}", training), prompt.topic
    assert len({prompt.text for prompt in held_out}) == len(held_out)


def test_a_split_by_topic_has_every_prompt_once_and_no_topic_twice() -> None:
    prompts = training_prompts()
    most, apart = split_by_topic(prompts, one_in=12)
    assert sorted(p.text for p in most + apart) == sorted(p.text for p in prompts)
    assert not {p.topic for p in most} & {p.topic for p in apart}
    assert 0.04 < len(apart) / len(prompts) < 0.15
